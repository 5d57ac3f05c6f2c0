//! `cargo lab charts`: draws the pictures of docs/internals/performance.md from the table on that
//! page.
//!
//! The table is the record of a run of `cargo lab compare`, so pictures and figures cannot
//! disagree. Each picture names the machine of that run. A test checks that the pictures match the
//! page.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use ringhaul_tools::workspace;

/// The page with the table.
const PAGE: &str = "docs/internals/performance.md";

/// The start of the table's heading.
pub(crate) const HEAD: &str = "| disk | load | IOPS, thousands |";

/// The start of the line that names the machine, the versions and the commit.
const MACHINE: &str = "Machine: ";

/// Options of `cargo lab charts`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Writes the pictures beside the page.
pub(crate) fn run(_: &Args) -> Result<()> {
    for (name, text) in pictures()? {
        let path = workspace::root().join("docs/internals").join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

/// Names and contents of the pictures.
fn pictures() -> Result<[(&'static str, String); 2]> {
    let path = workspace::root().join(PAGE);
    let page = std::fs::read_to_string(&path).context("reading the page")?;
    let (rows, machine) = (rows(&page)?, machine(&page)?);
    let (iops, cost) = (iops(&rows, machine), cost(&rows, machine));
    Ok([("performance-iops.svg", iops), ("performance-cost.svg", cost)])
}

/// Returns the line that names the machine.
fn machine(page: &str) -> Result<&str> {
    let line = page.lines().find(|line| line.starts_with(MACHINE));
    line.with_context(|| format!("{PAGE} has no line that begins with {MACHINE}"))
}

/// The drawn part of a row of the table. Figures are multiples of the rival's.
#[derive(Debug, PartialEq)]
pub(crate) struct Row {
    disk: String,
    load: String,
    iops: f64,
    /// The least and the greatest figure of the rounds.
    range: (f64, f64),
    cpu: f64,
    system_calls: f64,
}

pub(crate) fn rows(page: &str) -> Result<Vec<Row>> {
    let lines = page.lines().skip_while(|line| !line.starts_with(HEAD)).skip(2);
    let rows: Vec<Row> =
        lines.take_while(|line| line.starts_with('|')).map(row).collect::<Result<_>>()?;
    ensure!(!rows.is_empty(), "{PAGE} has no table that begins with {HEAD}");
    Ok(rows)
}

fn row(line: &str) -> Result<Row> {
    let plain = line.replace("**", "");
    let columns: Vec<&str> = plain.trim_matches('|').split('|').map(str::trim).collect();
    let [disk, load, _, _, _, by_rounds, _, cpu, system_calls] = columns[..] else {
        anyhow::bail!("a row of {} columns: {line}", columns.len());
    };
    let number = |text: &str| text.parse::<f64>().with_context(|| format!("{text:?} in {line}"));
    let (median, range) = by_rounds.split_once(" (").context("no range")?;
    let (least, most) = range.trim_end_matches(')').split_once('–').context("no range")?;
    Ok(Row {
        disk: disk.to_owned(),
        load: load.to_owned(),
        iops: number(median)?,
        range: (number(least)?, number(most)?),
        cpu: number(cpu)?,
        system_calls: number(system_calls)?,
    })
}

/// The start and end of the scale and the width of the picture, in pixels.
const LEFT: f64 = 236.0;
const RIGHT: f64 = 740.0;
const WIDTH: f64 = 760.0;
/// The place of the first row, the distance between rows and the gap between disks, in pixels.
const TOP: f64 = 92.0;
const STEP: f64 = 20.0;
const GAP: f64 = 8.0;
/// The height of the lines below the rows, in pixels.
const FOOT: f64 = 52.0;

/// Colours for light and for dark pages.
const STYLE: &str = "\
.ground{fill:#ffffff;stroke:#c8d0d8}.text{fill:#202830}.note{fill:#556070;font-size:11px}\
.band{fill:#f4f6f8}.grid{stroke:#dde3e9}.one{stroke:#556070;stroke-width:1.4}\
.good{fill:#3a6ea5;stroke:#3a6ea5}.bad{fill:#c0561a;stroke:#c0561a}.other{fill:#ffffff}\n\
@media (prefers-color-scheme: dark){\n\
.ground{fill:#12181f;stroke:#3a4652}.text{fill:#e6edf3}.note{fill:#a8b4c0}\
.band{fill:#1a222b}.grid{stroke:#2a343e}.one{stroke:#a8b4c0}\
.good{fill:#6ea3dc;stroke:#6ea3dc}.bad{fill:#e5884a;stroke:#e5884a}.other{fill:#12181f}}";

/// Returns the start of a picture: size, colours, ground and heading. `style` is added to the
/// colours.
pub(crate) fn head(title: &str, note: &str, (width, height): (f64, f64), style: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\" role=\"img\" aria-label=\"{title}. \
         {note}\">\n<style>\n{STYLE}{style}\n</style>\n\
         <rect class=\"ground\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"8\"/>\n\
         <text class=\"text\" x=\"16\" y=\"22\" font-size=\"14\">{title}</text>\n\
         <text class=\"note\" x=\"16\" y=\"38\">{note}</text>\n",
        width - 1.0,
        height - 1.0,
    )
}

/// The texts of a picture.
struct Labels<'a> {
    title: &'a str,
    note: &'a str,
    /// The name of the scale.
    axis: &'a str,
    machine: &'a str,
    /// The place, the class and the meaning of each dot.
    legend: &'a [(f64, &'a str, &'a str)],
}

/// A picture with a logarithmic scale.
struct Picture {
    text: String,
    scale: (f64, f64),
}

impl Picture {
    fn new(labels: &Labels<'_>, rows: &[Row], scale: (f64, f64), ticks: &[f64]) -> Self {
        let bottom = places(rows).last().map_or(TOP, |y| y + STEP / 2.0);
        let size = (WIDTH, bottom + FOOT);
        let mut picture = Self { text: head(labels.title, labels.note, size, ""), scale };
        for (x, class, meaning) in labels.legend {
            let text_x = x + 12.0;
            picture.line(&format!(
                "<circle class=\"{class}\" cx=\"{x}\" cy=\"55\" r=\"4\" stroke-width=\"1.6\"/>\
                 <text class=\"note\" x=\"{text_x}\" y=\"59\">{meaning}</text>"
            ));
        }
        picture.names(rows);
        for tick in ticks {
            let (x, class) = (picture.x(*tick), if same(*tick, 1.0) { "one" } else { "grid" });
            picture.line(&format!(
                "<path class=\"{class}\" d=\"M{x} 84V{bottom}\"/>\
                 <text class=\"note\" x=\"{x}\" y=\"80\" text-anchor=\"middle\">{tick}</text>"
            ));
        }
        let (middle, axis_y, machine_y) = ((LEFT + RIGHT) / 2.0, bottom + 18.0, bottom + 38.0);
        picture.line(&format!(
            "<text class=\"note\" x=\"{middle}\" y=\"{axis_y}\" text-anchor=\"middle\">{}</text>\n\
             <text class=\"note\" x=\"16\" y=\"{machine_y}\">{}</text>",
            labels.axis, labels.machine
        ));
        picture
    }

    /// Draws a band with the name of each disk, and the name of each load.
    fn names(&mut self, rows: &[Row]) {
        let mut top = TOP;
        for group in rows.chunk_by(|row, next| row.disk == next.disk) {
            let height = STEP * count(group.len());
            let disk = group.first().map_or("", |row| row.disk.as_str());
            let (width, base) = (WIDTH - 17.0, top + STEP / 2.0 + 4.0);
            self.line(&format!(
                "<rect class=\"band\" x=\"8.5\" y=\"{top}\" width=\"{width}\" \
                 height=\"{height}\" rx=\"4\"/>\
                 <text class=\"text\" x=\"16\" y=\"{base}\" font-weight=\"bold\">{disk}</text>"
            ));
            top += height + GAP;
        }
        for (row, y) in rows.iter().zip(places(rows)) {
            let (x, base) = (LEFT - 14.0, y + 4.0);
            self.line(&format!(
                "<text class=\"text\" x=\"{x}\" y=\"{base}\" text-anchor=\"end\">{}</text>",
                row.load
            ));
        }
    }

    /// Returns the column of a value. Values beyond the scale are drawn at its end.
    fn x(&self, value: f64) -> f64 {
        let (low, high) = self.scale;
        let part = (value.clamp(low, high) / low).ln() / (high / low).ln();
        (LEFT + part * (RIGHT - LEFT)).round()
    }

    fn line(&mut self, text: &str) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "{text}");
    }

    fn dot(&mut self, value: f64, y: f64, class: &str, other: bool) {
        let x = self.x(value);
        // A hollow dot is larger, so that a full one on the same place does not hide it.
        let (hollow, radius) = if other { (" other", 6) } else { ("", 4) };
        self.line(&format!(
            "<circle class=\"{class}{hollow}\" cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" \
             stroke-width=\"1.6\"/>"
        ));
    }

    fn finish(mut self) -> String {
        self.line("</svg>");
        self.text
    }
}

/// Returns the vertical places of rows. A gap separates disks.
fn places(rows: &[Row]) -> Vec<f64> {
    let mut top = TOP;
    let mut places = Vec::with_capacity(rows.len());
    for group in rows.chunk_by(|row, next| row.disk == next.disk) {
        for _ in group {
            places.push(top + STEP / 2.0);
            top += STEP;
        }
        top += GAP;
    }
    places
}

fn count(rows: usize) -> f64 {
    f64::from(u32::try_from(rows).expect("a count of rows fits"))
}

fn same(one: f64, other: f64) -> bool {
    (one - other).abs() < f64::EPSILON
}

fn iops(rows: &[Row], machine: &str) -> String {
    let labels = Labels {
        title: "IOPS, times those of the best setting of qemu-storage-daemon (QSD)",
        note: "Dot: median of the rounds. Line: from the least round to the greatest.",
        axis: "IOPS, times QSD (logarithmic scale)",
        machine,
        legend: &[(20.0, "good", "Ringhaul has more"), (160.0, "bad", "Ringhaul has less")],
    };
    let ticks = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0];
    let mut picture = Picture::new(&labels, rows, (0.5, 18.0), &ticks);
    for (row, y) in rows.iter().zip(places(rows)) {
        let class = if row.iops < 1.0 { "bad" } else { "good" };
        let (from, to) = (picture.x(row.range.0), picture.x(row.range.1));
        picture.line(&format!(
            "<path class=\"{class}\" d=\"M{from} {y}H{to}\" stroke-width=\"1.6\"/>"
        ));
        picture.dot(row.iops, y, class, false);
    }
    picture.finish()
}

fn cost(rows: &[Row], machine: &str) -> String {
    let labels = Labels {
        title: "CPU time and system calls of the server for each I/O, times those of QSD",
        note: "Left of 1 Ringhaul takes less. A row without system calls is at the left end.",
        axis: "CPU time and system calls for each I/O, times QSD (logarithmic scale)",
        machine,
        legend: &[
            (20.0, "good", "CPU time"),
            (104.0, "good other", "system calls"),
            (208.0, "bad", "the same, where Ringhaul takes more"),
        ],
    };
    let ticks = [0.05, 0.1, 0.25, 0.5, 1.0, 2.0];
    let mut picture = Picture::new(&labels, rows, (0.03, 3.0), &ticks);
    for (row, y) in rows.iter().zip(places(rows)) {
        let class = |value: f64| if value > 1.0 { "bad" } else { "good" };
        picture.dot(row.system_calls, y, class(row.system_calls), true);
        picture.dot(row.cpu, y, class(row.cpu), false);
    }
    picture.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_read_with_its_marks() {
        let line = "| file | randread 4k depth 8 | 107 | aio=native | 1.01 | **0.97 (0.86–1.29)** \
                    | 92% | **2.48** | 0.31 |";
        let expected = Row {
            disk: "file".to_owned(),
            load: "randread 4k depth 8".to_owned(),
            iops: 0.97,
            range: (0.86, 1.29),
            cpu: 2.48,
            system_calls: 0.31,
        };
        assert_eq!(row(line).unwrap(), expected);
        assert!(row("| file | 1 |").is_err());
        assert!(rows("no table").is_err());
    }

    #[test]
    fn a_gap_separates_disks() {
        let row = |disk: &str| Row {
            disk: disk.to_owned(),
            load: String::new(),
            iops: 1.0,
            range: (1.0, 1.0),
            cpu: 1.0,
            system_calls: 1.0,
        };
        let first = TOP + STEP / 2.0;
        let expected = [first, first + STEP, first + 2.0 * STEP + GAP];
        assert_eq!(places(&[row("null"), row("null"), row("zram")]), expected);
    }

    #[test]
    fn a_page_names_its_machine() {
        let line = "Machine: one CPU.";
        assert_eq!(machine(&format!("# Page\n\n{line}\n")).unwrap(), line);
        assert!(machine("# Page\n").is_err());
    }

    #[test]
    fn the_pictures_in_the_tree_match_the_table() {
        for (name, text) in pictures().unwrap() {
            let path = workspace::root().join("docs/internals").join(name);
            let kept = std::fs::read_to_string(path).unwrap();
            assert!(kept == text, "{name} is not as the table: run cargo lab charts");
        }
    }
}
