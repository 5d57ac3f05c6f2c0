//! The pictures, as SVG in the colours of the page.

use anyhow::{Result, anyhow};
use plotters::chart::MeshStyle;
use plotters::coord::Shift;
use plotters::coord::ranged1d::Ranged;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::sample::{LATENCY_PERCENTILES, SIZE_PERCENTILES};
use crate::rig::spread::{Spread, number};

/// Placeholders for the colours of the page, which has one set for light and one for dark.
const INK: RGBColor = RGBColor(1, 2, 3);
const SOFT: RGBColor = RGBColor(1, 2, 4);
const LINE: RGBColor = RGBColor(1, 2, 5);
const OFF: RGBColor = RGBColor(1, 2, 6);
const ON: RGBColor = RGBColor(1, 2, 7);
const NAMES: [(RGBColor, &str); 5] =
    [(INK, "--ink"), (SOFT, "--soft"), (LINE, "--line"), (OFF, "--off"), (ON, "--on")];

const WIDTH: u32 = 540;
const FONT_SIZE: u32 = 13;
/// The height of a row in a picture with rows.
const ROW: u32 = 34;
/// The width of the names of rows.
const NAME_WIDTH: u32 = 215;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A value before and after, with a name.
pub(super) struct Row<T> {
    pub(super) name: String,
    pub(super) off: T,
    pub(super) on: T,
}

/// Draws the number of completions harvested at once, at the usual percentiles.
pub(super) fn batches(off: &[f64], on: &[f64], most: f64) -> Result<String> {
    picture(300, |root| {
        let last = (SIZE_PERCENTILES.len() - 1) as f64;
        let mut chart =
            frame(root, 26, 48).build_cartesian_2d(0.0..last, 0.0..most * 1.05).map_err(failed)?;
        let percent = |x: &f64| {
            let place = SIZE_PERCENTILES.iter().enumerate().find(|(i, _)| *i as f64 == x.round());
            place.map_or_else(String::new, |(_, name)| name.replace('_', "."))
        };
        coloured(&mut chart.configure_mesh())
            .disable_x_mesh()
            .x_labels(SIZE_PERCENTILES.len())
            .x_label_formatter(&percent)
            .y_label_formatter(&|y| format!("{y:.0}"))
            .x_desc("percentile of harvests")
            .y_desc("completions at once")
            .draw()
            .map_err(failed)?;
        for (values, colour) in [(off, OFF), (on, ON)] {
            let points = || values.iter().enumerate().map(|(i, value)| (i as f64, *value));
            let line = LineSeries::new(points(), colour.stroke_width(2));
            chart.draw_series(line).map_err(failed)?;
            let dots = points().map(|point| Circle::new(point, 3, colour.filled()));
            chart.draw_series(dots).map_err(failed)?;
        }
        legend(root, ["off", "on"])
    })
}

/// Draws the share of requests that are done within a time. `off` and `on` are percentiles in
/// microseconds.
pub(super) fn latencies(off: &[f64], on: &[f64]) -> Result<String> {
    let all = || off.iter().chain(on).copied().filter(|us| *us > 0.0);
    let least = all().fold(f64::INFINITY, f64::min).min(1e9);
    let most = all().fold(least, f64::max);
    picture(300, |root| {
        let mut chart = frame(root, 20, 48)
            .build_cartesian_2d((least * 0.8..most * 1.2).log_scale(), 0.0..100.0)
            .map_err(failed)?;
        coloured(&mut chart.configure_mesh())
            .x_labels(6)
            .x_label_formatter(&|us| plain(*us))
            .y_label_formatter(&|y| format!("{y:.0}%"))
            .x_desc("latency in \u{b5}s, logarithmic")
            .y_desc("requests done")
            .draw()
            .map_err(failed)?;
        for (values, colour) in [(off, OFF), (on, ON)] {
            let points = values.iter().zip(LATENCY_PERCENTILES);
            let points = points.filter(|(us, _)| **us > 0.0).map(|(us, (_, at))| (*us, at));
            let line = LineSeries::new(points, colour.stroke_width(2));
            chart.draw_series(line).map_err(failed)?;
        }
        legend(root, ["off", "on"])
    })
}

/// Draws medians with their spread, a row each, on a logarithmic axis.
pub(super) fn spreads(rows: &[Row<Spread>], axis: &str) -> Result<String> {
    let all = || rows.iter().flat_map(|row| [row.off, row.on]);
    let least = all().map(|spread| spread.min).filter(|min| *min > 0.0).fold(1e12, f64::min);
    let most = all().map(|spread| spread.max).fold(least, f64::max);
    let end = rows.len() as f64;
    picture(height(rows.len()), |root| {
        let mut chart = frame(root, 20, NAME_WIDTH)
            .build_cartesian_2d((least * 0.8..most * 1.25).log_scale(), end..0.0)
            .map_err(failed)?;
        coloured(&mut chart.configure_mesh())
            .disable_y_mesh()
            .x_labels(5)
            .y_labels(0)
            .x_label_formatter(&|value| plain(*value))
            .x_desc(axis)
            .draw()
            .map_err(failed)?;
        for (index, row) in rows.iter().enumerate() {
            let middle = index as f64 + 0.5;
            let (_, y) = chart.backend_coord(&(least, middle));
            name(root, &row.name, y)?;
            for (spread, colour, y) in [(row.off, OFF, middle - 0.17), (row.on, ON, middle + 0.17)]
            {
                let range = [(spread.min.max(least), y), (spread.max, y)];
                let line = PathElement::new(range, colour.stroke_width(2));
                chart.draw_series([line]).map_err(failed)?;
                let dot = Circle::new((spread.median.max(least), y), 4, colour.filled());
                chart.draw_series([dot]).map_err(failed)?;
            }
        }
        legend(root, ["off", "on: median, least and greatest"])
    })
}

/// Draws figures as bars, a row each, from zero.
pub(super) fn bars(rows: &[Row<f64>], axis: &str) -> Result<String> {
    let most = rows.iter().flat_map(|row| [row.off, row.on]).fold(f64::MIN_POSITIVE, f64::max);
    let end = rows.len() as f64;
    picture(height(rows.len()), |root| {
        let mut chart =
            frame(root, 56, NAME_WIDTH).build_cartesian_2d(0.0..most, end..0.0).map_err(failed)?;
        coloured(&mut chart.configure_mesh())
            .disable_y_mesh()
            .x_labels(5)
            .y_labels(0)
            .x_label_formatter(&|value| plain(*value))
            .x_desc(axis)
            .draw()
            .map_err(failed)?;
        for (index, row) in rows.iter().enumerate() {
            let top = index as f64;
            let (_, y) = chart.backend_coord(&(0.0, top + 0.5));
            name(root, &row.name, y)?;
            for (value, colour, from) in [(row.off, OFF, top + 0.14), (row.on, ON, top + 0.52)] {
                let bar = Rectangle::new([(0.0, from), (value, from + 0.34)], colour.filled());
                chart.draw_series([bar]).map_err(failed)?;
                let (x, y) = chart.backend_coord(&(value, from + 0.17));
                let style = font(INK).pos(Pos::new(HPos::Left, VPos::Center));
                root.draw(&Text::new(number(value), (x + 5, y), style)).map_err(failed)?;
            }
        }
        legend(root, ["off", "on"])
    })
}

/// Makes a chart with room around it. `names` is the room for labels on its left.
fn frame<'a, 'b>(
    root: &'a Area<'b>,
    right: u32,
    names: u32,
) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut frame = ChartBuilder::on(root);
    frame.margin(10).margin_top(26).margin_right(right);
    frame.x_label_area_size(40).y_label_area_size(names);
    frame
}

/// Gives a mesh the colours of the page.
fn coloured<'m, 'a, 'b, X: Ranged, Y: Ranged, D: DrawingBackend>(
    mesh: &'m mut MeshStyle<'a, 'b, X, Y, D>,
) -> &'m mut MeshStyle<'a, 'b, X, Y, D> {
    mesh.bold_line_style(LINE)
        .light_line_style(TRANSPARENT)
        .axis_style(SOFT)
        .label_style(font(SOFT))
        .axis_desc_style(font(SOFT))
}

fn picture(height: u32, draw: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        draw(&root)?;
        root.present().map_err(failed)?;
    }
    for (RGBColor(r, g, b), name) in NAMES {
        svg = svg.replace(&format!("\"#{r:02X}{g:02X}{b:02X}\""), &format!("\"var({name})\""));
    }
    Ok(svg.replacen("<svg ", "<svg role=\"img\" ", 1))
}

fn height(rows: usize) -> u32 {
    u32::try_from(rows).expect("a count of rows fits") * ROW + 86
}

fn font(colour: RGBColor) -> TextStyle<'static> {
    ("sans-serif", FONT_SIZE).into_font().color(&colour)
}

/// Draws the name of a row, left of it.
fn name(root: &Area<'_>, text: &str, y: i32) -> Result<()> {
    let style = font(INK).pos(Pos::new(HPos::Right, VPos::Center));
    let x = i32::try_from(NAME_WIDTH).expect("a constant fits") + 2;
    root.draw(&Text::new(text.to_owned(), (x, y), style)).map_err(failed)
}

/// Draws the meaning of the two colours, above the picture.
fn legend(root: &Area<'_>, names: [&str; 2]) -> Result<()> {
    for (text, colour, x) in [(names[0], OFF, 54), (names[1], ON, 110)] {
        let square = Rectangle::new([(x, 8), (x + 10, 18)], colour.filled());
        root.draw(&square).map_err(failed)?;
        let style = font(INK).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw(&Text::new(text.to_owned(), (x + 16, 13), style)).map_err(failed)?;
    }
    Ok(())
}

/// Formats a number on an axis, without superfluous digits.
fn plain(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{}M", value / 1e6),
        value if value >= 1e3 => format!("{}k", value / 1e3),
        value => format!("{}", (value * 100.0).round() / 100.0),
    }
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing a picture: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_take_their_colours_from_the_page() {
        let spread = Spread { median: 2e5, min: 1e5, max: 3e5 };
        let rows = [Row { name: "zram <aio>".to_owned(), off: spread, on: spread }];
        let pictures = [
            batches(&[128.0; 11], &[16.0; 11], 128.0).unwrap(),
            latencies(&[40.0; 17], &[20.0; 17]).unwrap(),
            spreads(&rows, "IOPS").unwrap(),
            bars(&[Row { name: "null".to_owned(), off: 1.5, on: 0.0 }], "calls").unwrap(),
        ];
        for svg in pictures {
            for word in ["var(--on)", "var(--off)", "var(--soft)", "off"] {
                assert!(svg.contains(word), "no {word} in {svg}");
            }
            assert!(!svg.contains("#0102"), "a colour was left: {svg}");
        }
    }

    #[test]
    fn empty_figures_can_be_drawn() {
        assert!(latencies(&[], &[]).is_ok());
        assert!(bars(&[], "nothing").is_ok());
        assert!(spreads(&[], "nothing").is_ok());
    }

    #[test]
    fn numbers_on_an_axis_are_short() {
        assert_eq!([0.1, 20.0, 1500.0, 2e6].map(plain), ["0.1", "20", "1.5k", "2M"]);
    }
}
