//! The picture: a panel for each disk and load. A cell's colour compares the adaptive setting with
//! the best fixed one.

use std::fmt::Write as _;

use super::plan::{DEPTHS, Driver, Load, SETTINGS};
use super::verdict::{NEVER_UNDER, Outcome, USUALLY};
use crate::charts;
use crate::rig::targets::Target;

const TITLE: &str = "IOPS of the adaptive setting, times those of the best fixed one";
const NOTE: &str = "Medians of ratios within a round. Down: what the driver does; across: requests \
                    in flight. Over 1 the adaptive setting has more.";

/// Sizes in pixels: a cell, the names left of panels, the room above a panel's cells and between
/// panels, and the picture's width.
const CELL: (f64, f64) = (40.0, 22.0);
const NAMES: f64 = 76.0;
const ABOVE: f64 = 40.0;
const BETWEEN: f64 = 20.0;
const WIDTH: f64 = 760.0;
/// The top of the first panel.
const TOP: f64 = 48.0;
/// The side of a square in the legend.
const SQUARE: f64 = 12.0;

/// Classes of ratios, each up to its limit, from the worst to the best. The first two end at the
/// required ratios.
const CLASSES: [(&str, f64, &str); 7] = [
    ("w3", NEVER_UNDER, "under 0.85"),
    ("w2", USUALLY, "0.85–0.95"),
    ("w1", 0.98, "0.95–0.98"),
    ("n0", 1.02, "0.98–1.02"),
    ("b1", 1.05, "1.02–1.05"),
    ("b2", 1.15, "1.05–1.15"),
    ("b3", f64::INFINITY, "from 1.15"),
];

/// Orange is worse and blue is better, as in all pictures. `strong` and `faint` are the classes of
/// numbers on strong and on faint colours.
const STYLE: &str = "\n\
.w3{fill:#a8430c}.w2{fill:#e09a62}.w1{fill:#f6dcc6}.n0{fill:#eef0f2}\
.b1{fill:#cfe0f1}.b2{fill:#8db6de}.b3{fill:#2c649e}\
.strong{fill:#ffffff}.faint{fill:#202830}\n\
@media (prefers-color-scheme: dark){\n\
.w3{fill:#f09a5e}.w2{fill:#a8571f}.w1{fill:#53331d}.n0{fill:#2a323a}\
.b1{fill:#21405e}.b2{fill:#2f679f}.b3{fill:#86b8ec}\
.strong{fill:#12181f}.faint{fill:#f0f4f8}}";

/// Returns the class of a ratio.
fn class(ratio: f64) -> &'static str {
    CLASSES.iter().find(|(_, limit, _)| ratio < *limit).map_or("b3", |(name, ..)| name)
}

/// Returns the class of the number on a colour. The ends of the scale are strong.
fn text_class(class: &str) -> &'static str {
    if ["w3", "b3"].contains(&class) { "strong" } else { "faint" }
}

/// Draws the picture as SVG.
pub(super) fn draw(outcomes: &[Outcome]) -> String {
    let targets: Vec<_> = Target::ALL
        .into_iter()
        .filter(|target| outcomes.iter().any(|one| one.cell.target == *target))
        .collect();
    let panel = ABOVE + CELL.1 * 4.0 + BETWEEN / 2.0;
    let bottom = places().take(targets.len()).fold(TOP, |_, place| TOP + panel * (place + 1.0));
    let height = bottom + SQUARE + 16.0;
    let mut svg = charts::head(TITLE, NOTE, (WIDTH, height), STYLE);
    for (target, row) in targets.iter().zip(places()) {
        for (load, column) in Load::ALL.into_iter().zip(places()) {
            let left = 12.0 + NAMES + column * (CELL.0 * 8.0 + BETWEEN);
            let inside = |one: &&Outcome| (one.cell.target, one.cell.load) == (*target, load);
            let cells: Vec<_> = outcomes.iter().filter(inside).collect();
            let title = format!("{target}, {load}");
            draw_panel(&mut svg, (left, TOP + row * panel), &title, &cells);
        }
    }
    draw_legend(&mut svg, bottom);
    svg + "</svg>\n"
}

fn draw_panel(svg: &mut String, (left, top): (f64, f64), title: &str, cells: &[&Outcome]) {
    let first = top + ABOVE;
    line(svg, "text", "", (left, top + 18.0), title);
    for (depth, place) in DEPTHS.iter().zip(places()) {
        let x = left + CELL.0 * (place + 0.5);
        line(svg, "note", "middle", (x, first - 5.0), &depth.to_string());
    }
    for (driver, place) in Driver::ALL.iter().zip(places()) {
        let y = first + CELL.1 * place;
        // The panel on the right has the same rows, so only the left one names them.
        if left < NAMES * 2.0 {
            line(svg, "note", "end", (left - 6.0, y + 15.0), &driver.to_string());
        }
        for (depth, place) in DEPTHS.iter().zip(places()) {
            let inside = |one: &&&Outcome| (one.cell.driver, one.cell.depth) == (*driver, *depth);
            if let Some(outcome) = cells.iter().find(inside) {
                draw_cell(svg, (left + CELL.0 * place, y), outcome);
            }
        }
    }
}

fn draw_cell(svg: &mut String, (x, y): (f64, f64), outcome: &Outcome) {
    let (Some(ratio), Some(best)) = (outcome.iops_ratio(), outcome.best()) else {
        line(svg, "note", "middle", (x + CELL.0 / 2.0, y + 15.0), "–");
        return;
    };
    let class = class(ratio);
    let (width, height) = (CELL.0 - 1.0, CELL.1 - 1.0);
    // Writing to a String cannot fail.
    _ = writeln!(
        svg,
        "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" \
         rx=\"2\"><title>{}: {ratio:.3} times {}</title></rect>",
        outcome.cell, SETTINGS[best]
    );
    let middle = (x + width / 2.0, y + 15.0);
    line(svg, text_class(class), "middle", middle, &format!("{ratio:.2}"));
}

fn draw_legend(svg: &mut String, top: f64) {
    for ((name, _, text), place) in CLASSES.iter().zip(places()) {
        let x = 12.0 + NAMES + place * 92.0;
        _ = writeln!(
            svg,
            "<rect class=\"{name}\" x=\"{x}\" y=\"{top}\" width=\"{SQUARE}\" height=\"{SQUARE}\" \
             rx=\"2\"/>"
        );
        line(svg, "note", "", (x + SQUARE + 5.0, top + 10.0), text);
    }
}

fn line(svg: &mut String, class: &str, anchor: &str, (x, y): (f64, f64), text: &str) {
    let anchor = match anchor {
        "" => String::new(),
        anchor => format!(" text-anchor=\"{anchor}\""),
    };
    _ = writeln!(svg, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\"{anchor}>{text}</text>");
}

/// 0, 1, 2 and so on.
fn places() -> impl Iterator<Item = f64> {
    (0_u32..).map(f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::verdict::tests::outcome;

    /// Returns the names of the elements if they are nested correctly and no text between them
    /// could be taken for markup.
    fn elements(svg: &str) -> Result<Vec<String>, String> {
        let (mut open, mut all, mut rest) = (Vec::new(), Vec::new(), svg);
        while let Some(start) = rest.find('<') {
            if rest[..start].contains(['>', '&']) {
                return Err(format!("markup in the text {:?}", &rest[..start]));
            }
            let end = rest.find('>').ok_or("an element without an end")?;
            let tag = &rest[start + 1..end];
            rest = &rest[end + 1..];
            if let Some(name) = tag.strip_prefix('/') {
                if open.pop().as_deref() != Some(name) {
                    return Err(format!("</{name}> closes nothing"));
                }
                continue;
            }
            let inside = tag.trim_end_matches('/');
            let name = inside.split(' ').next().unwrap_or_default().to_owned();
            let quotes = inside.matches('"').count();
            if quotes != 2 * inside.matches("=\"").count() || inside.contains(['<', '&']) {
                return Err(format!("attributes of {tag:?}"));
            }
            if inside.len() == tag.len() {
                open.push(name.clone());
            }
            all.push(name);
        }
        if open.is_empty() { Ok(all) } else { Err(format!("{open:?} do not end")) }
    }

    #[test]
    fn the_check_of_markup_sees_what_is_wrong() {
        assert_eq!(elements("<a x=\"1\"><b/>text</a>\n").unwrap(), ["a", "b"]);
        for wrong in ["<a>", "</a>", "<a><b></a></b>", "<a x=\"1>2</a>", "<a>1 & 2</a>"] {
            assert!(elements(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_picture_is_well_formed_and_has_each_cell_in_its_colour() {
        let ratios = [0.8, 0.9, 0.97, 1.0, 1.03, 1.1, 1.5];
        let depths = ratios.iter().zip(DEPTHS);
        let outcomes: Vec<_> =
            depths.map(|(ratio, depth)| outcome(depth, (100.0 * ratio, 2.0), &[])).collect();
        let svg = draw(&outcomes);
        let elements = elements(&svg).unwrap();
        // The ground, the cells and the legend.
        let count = elements.iter().filter(|name| *name == "rect").count();
        assert_eq!(count, 1 + ratios.len() + CLASSES.len());
        for ((ratio, depth), (class, ..)) in ratios.iter().zip(DEPTHS).zip(CLASSES) {
            let title = format!("<title>zram/randread-depth-{depth}-sleeping: {ratio:.3} times");
            let cell = svg.lines().find(|line| line.contains(&title));
            let cell = cell.unwrap_or_else(|| panic!("no {title} in {svg}"));
            assert!(cell.contains(&format!("class=\"{class}\"")), "{cell}");
            assert!(svg.contains(&format!("middle\">{ratio:.2}</text>")), "{svg}");
        }
        assert!(svg.contains("prefers-color-scheme: dark"));
        assert!(svg.contains("zram, randread") && !svg.contains("file, randread"));
    }

    #[test]
    fn what_stood_still_and_nothing_at_all_can_be_drawn() {
        let mut still = outcome(8, (1.0, 1.0), &[]);
        still.series.iter_mut().for_each(Vec::clear);
        let svg = draw(&[still]);
        elements(&svg).unwrap();
        assert!(svg.contains("middle\">–</text>"), "{svg}");
        elements(&draw(&[])).unwrap();
    }

    #[test]
    fn a_limit_belongs_to_the_better_class() {
        assert_eq!([0.85, 0.95, 1.0].map(class), ["w2", "w1", "n0"]);
        assert_eq!([0.849, 0.9499, 9.9].map(class), ["w3", "w2", "b3"]);
        assert_eq!(["w3", "w2", "b3"].map(text_class), ["strong", "faint", "strong"]);
    }
}
