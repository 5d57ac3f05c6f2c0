//! The picture: panels of lines over time, in colours for light and dark pages.

use std::fmt::Write as _;

use anyhow::{Result, bail};

use crate::charts::head;

/// The unit of a panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Requests,
    RequestsPerSecond,
    Seconds,
    Share,
}

impl Unit {
    /// The unit with this name in Grafana.
    pub(super) fn from_grafana(name: Option<&str>) -> Result<Self> {
        Ok(match name {
            Some("short") => Self::Requests,
            Some("reqps") => Self::RequestsPerSecond,
            Some("s") => Self::Seconds,
            Some("percentunit") => Self::Share,
            _ => bail!("a panel has the unit {name:?}, which has no axis"),
        })
    }

    /// The name of the axis.
    fn axis(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::RequestsPerSecond => "requests per second",
            Self::Seconds => "time, logarithmic",
            Self::Share => "share of a CPU",
        }
    }

    fn label(self, value: f64) -> String {
        match self {
            Self::Seconds if value < 0.000_999 => format!("{} \u{b5}s", (value * 1e6).round()),
            Self::Seconds if value < 0.999 => format!("{} ms", (value * 1e3).round()),
            Self::Seconds => format!("{value} s"),
            Self::Share => format!("{}%", (value * 100.0).round()),
            _ if value >= 1000.0 => format!("{}k", value / 1000.0),
            _ => format!("{value}"),
        }
    }
}

/// A line of a panel: times in seconds, and values.
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// A panel of the dashboard.
pub(super) struct Panel {
    pub(super) title: String,
    pub(super) unit: Unit,
    pub(super) series: Vec<Series>,
}

/// Sizes in pixels: the picture, a panel, and the place of the lines in it.
const WIDTH: f64 = 760.0;
const PANEL: (f64, f64) = (372.0, 214.0);
const TOP: f64 = 48.0;
const INSIDE: (f64, f64, f64, f64) = (58.0, 50.0, 290.0, 124.0);
const FOOT: f64 = 68.0;

/// Colours of lines, for light and for dark pages.
const STYLE: &str = "\n\
.plot{fill:none;stroke-width:1.6}.title{font-weight:bold}\
.l0{stroke:#3a6ea5}.l1{stroke:#c0561a}.l2{stroke:#4b8b3b}.l3{stroke:#8e44ad}\n\
@media (prefers-color-scheme: dark){\
.l0{stroke:#6ea3dc}.l1{stroke:#e5884a}.l2{stroke:#8fcf7a}.l3{stroke:#c89be0}}";

/// Draws the panels. `start` is the time of the first phase, and a phase has `phase` seconds.
pub(super) fn draw(
    panels: &[Panel],
    start: f64,
    phase: f64,
    phases: &[&str],
    machine: &str,
) -> String {
    let rows = number(panels.len().div_ceil(2));
    let size = (WIDTH, TOP + rows * PANEL.1 + FOOT);
    let note = "A file behind one export, under a load of 4 KiB requests that changes.";
    let mut text = head("Panels of the Grafana dashboard", note, size, STYLE);
    let times = (start, start + phase * number(phases.len()));
    for (index, panel) in panels.iter().enumerate() {
        let (column, row) = (number(index % 2), number(index / 2));
        let place = (8.0 + column * PANEL.0, TOP + row * PANEL.1);
        draw_panel(&mut text, panel, place, times, phase);
    }
    let list: Vec<String> =
        phases.iter().enumerate().map(|(index, name)| format!("{}: {name}", index + 1)).collect();
    let foot = size.1 - FOOT + 24.0;
    for (line, y) in [(list.join(" \u{b7} ").as_str(), foot), (machine, foot + 24.0)] {
        line_of(&mut text, &format!("<text class=\"note\" x=\"16\" y=\"{y}\">{line}</text>"));
    }
    text + "</svg>\n"
}

fn line_of(text: &mut String, line: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{line}");
}

fn number(count: usize) -> f64 {
    f64::from(u32::try_from(count).expect("a small count fits"))
}

/// The scale of a panel's values.
struct Scale {
    is_logarithmic: bool,
    range: (f64, f64),
    ticks: Vec<f64>,
}

impl Scale {
    fn new(panel: &Panel) -> Self {
        let values = panel.series.iter().flat_map(|series| &series.points).map(|(_, value)| *value);
        let most = values.clone().fold(0.0, f64::max);
        if panel.unit == Unit::Seconds {
            let least = values.filter(|value| *value > 0.0).fold(most, f64::min);
            let (low, high) = (least.log10().floor(), most.log10().ceil());
            let decades = (0..12).map(|decade| low + f64::from(decade));
            let ticks: Vec<f64> =
                decades.take_while(|power| *power <= high).map(|power| 10f64.powf(power)).collect();
            return Self {
                is_logarithmic: true,
                range: (10f64.powf(low), 10f64.powf(high)),
                ticks,
            };
        }
        let step = step(most / 4.0);
        let high = (most / step).ceil().max(1.0) * step;
        let ticks = (0..9).map(|tick| f64::from(tick) * step).take_while(|tick| *tick <= high);
        Self { is_logarithmic: false, range: (0.0, high), ticks: ticks.collect() }
    }

    /// The share of the height at which a value is drawn.
    fn part(&self, value: f64) -> f64 {
        let (low, high) = self.range;
        let value = value.clamp(low, high);
        match self.is_logarithmic {
            true => (value / low).ln() / (high / low).ln(),
            false => (value - low) / (high - low),
        }
    }
}

/// The least of 1, 2, 5, 10, 20 ... that is not below `value`.
fn step(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1e-9).log10().floor());
    let found = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= value);
    found.unwrap_or(10.0) * power
}

/// A text at a place, with its class and its anchor.
fn text_at(text: &mut String, (x, y): (f64, f64), class: &str, anchor: &str, words: &str) {
    line_of(
        text,
        &format!(
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" \
             text-anchor=\"{anchor}\">{words}</text>"
        ),
    );
}

fn draw_panel(
    text: &mut String,
    panel: &Panel,
    (left, top): (f64, f64),
    (start, end): (f64, f64),
    phase: f64,
) {
    let (x0, y0) = (left + INSIDE.0, top + INSIDE.1);
    let (right, bottom) = (x0 + INSIDE.2, y0 + INSIDE.3);
    let scale = Scale::new(panel);
    let x = |time: f64| x0 + INSIDE.2 * ((time - start) / (end - start)).clamp(0.0, 1.0);
    let y = |value: f64| bottom - INSIDE.3 * scale.part(value);
    let (band_left, width, height) = (left + 2.0, PANEL.0 - 8.0, PANEL.1 - 8.0);
    line_of(
        text,
        &format!(
            "<rect class=\"band\" x=\"{band_left}\" y=\"{top}\" width=\"{width}\" \
             height=\"{height}\" rx=\"4\"/>"
        ),
    );
    text_at(text, (left + 12.0, top + 18.0), "text title", "start", &panel.title);
    text_at(text, (right, top + 18.0), "note", "end", panel.unit.axis());
    for tick in &scale.ticks {
        let at = y(*tick);
        line_of(text, &format!("<path class=\"grid\" d=\"M{x0} {at:.1}H{right}\"/>"));
        text_at(text, (x0 - 6.0, at + 4.0), "note", "end", &panel.unit.label(*tick));
    }
    let phases = ((end - start) / phase).round();
    for index in (0..20).map(f64::from).take_while(|index| *index <= phases) {
        let at = x(start + index * phase);
        line_of(text, &format!("<path class=\"grid\" d=\"M{at:.1} {y0}V{bottom}\"/>"));
        let seconds = format!("{} s", index * phase);
        text_at(text, (at, bottom + 14.0), "note", "middle", &seconds);
        if index < phases {
            let middle = x(start + (index + 0.5) * phase);
            text_at(text, (middle, bottom + 26.0), "note", "middle", &format!("{}", index + 1.0));
        }
    }
    draw_lines(text, panel, (x0, top + 38.0), x, y);
}

/// Draws the lines of a panel, and their legend at `place`.
fn draw_lines(
    text: &mut String,
    panel: &Panel,
    (mut left, at): (f64, f64),
    x: impl Fn(f64) -> f64,
    y: impl Fn(f64) -> f64,
) {
    for (index, series) in panel.series.iter().enumerate() {
        let class = format!("plot l{}", index % 4);
        let mut path = String::new();
        for (time, value) in series.points.iter().filter(|(_, value)| value.is_finite()) {
            let command = if path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{command}{:.1} {:.1}", x(*time), y(*value));
        }
        line_of(text, &format!("<path class=\"{class}\" d=\"{path}\"/>"));
        line_of(text, &format!("<path class=\"{class}\" d=\"M{left} {}h14\"/>", at - 4.0));
        text_at(text, (left + 18.0, at), "note", "start", &series.name);
        left += 32.0 + 6.2 * number(series.name.chars().count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(unit: Unit, values: &[f64]) -> Panel {
        let points = values.iter().enumerate().map(|(index, value)| (number(index), *value));
        let series = vec![Series { name: "read".to_owned(), points: points.collect() }];
        Panel { title: "Reads".to_owned(), unit, series }
    }

    #[test]
    fn scales_have_round_ticks() {
        assert_eq!([0.3, 1.0, 7.0, 120.0].map(step), [0.5, 1.0, 10.0, 200.0]);
        let scale = Scale::new(&panel(Unit::RequestsPerSecond, &[0.0, 90_000.0]));
        assert_eq!(scale.range, (0.0, 100_000.0));
        assert_eq!((scale.part(50_000.0), scale.part(200_000.0)), (0.5, 1.0));
        let scale = Scale::new(&panel(Unit::Seconds, &[2e-5, 3e-3]));
        assert_eq!(scale.ticks.len(), 4, "10 us to 10 ms");
        assert!((scale.part(1e-4) - 1.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn labels_have_units() {
        let labels = [5e-5, 0.01, 2.0].map(|value| Unit::Seconds.label(value));
        assert_eq!(labels, ["50 \u{b5}s", "10 ms", "2 s"]);
        assert_eq!(Unit::Share.label(0.5), "50%");
        assert_eq!(Unit::RequestsPerSecond.label(20_000.0), "20k");
        assert!(Unit::from_grafana(Some("none")).is_err());
    }

    #[test]
    fn a_picture_has_a_line_for_each_series() {
        let panels = [panel(Unit::Requests, &[1.0, f64::NAN, 3.0]), panel(Unit::Share, &[0.5])];
        let text = draw(&panels, 0.0, 2.0, &["one", "two"], "Machine: M");
        assert!(text.contains("1: one \u{b7} 2: two") && text.contains("Machine: M"), "{text}");
        assert_eq!(text.matches("class=\"plot l0\"").count(), 4, "two lines with legends");
        assert!(!text.contains("NaN"), "{text}");
    }
}
