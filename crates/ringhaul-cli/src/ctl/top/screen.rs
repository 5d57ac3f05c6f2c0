//! The pages of `ringhaul ctl top`, as text.

use std::collections::VecDeque;
use std::fmt::Write;

use device::{LATENCY_BOUNDS, latency_bound_ns};
use ringhaul_options::redact;

use super::figures::{ExportFigures, Figures};

/// The intervals of a sparkline.
pub(super) const HISTORY_MAX: usize = 60;

/// The order of exports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum SortKey {
    /// Requests per second.
    Iops,
    /// Bytes per second.
    Bandwidth,
    /// The 99th percentile of latency.
    P99,
    /// Unanswered requests.
    Depth,
    /// The name.
    Name,
}

impl SortKey {
    /// The key on the keyboard for each order.
    const KEYS: [(u8, Self); 5] = [
        (b'i', Self::Iops),
        (b'b', Self::Bandwidth),
        (b'p', Self::P99),
        (b'd', Self::Depth),
        (b'n', Self::Name),
    ];

    /// The order that a key on the keyboard chooses.
    pub(super) fn from_key(key: u8) -> Option<Self> {
        Self::KEYS.into_iter().find_map(|(own, order)| (own == key).then_some(order))
    }

    /// The keys on the keyboard, for a line of help.
    pub(super) fn keyboard() -> String {
        Self::KEYS.map(|(key, _)| char::from(key).to_string()).join(" ")
    }
}

/// The size and the abilities of the terminal.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terminal {
    pub(super) columns: usize,
    pub(super) rows: usize,
    pub(super) has_colours: bool,
}

/// A column: its head, its width, and its cell.
type Column = (&'static str, usize, fn(&ExportFigures) -> String);

/// A line of the last minute: its head, its present value, and each value.
type Line = (&'static str, String, fn(&ExportFigures) -> f64);

/// The columns by importance. The later ones are left out on a narrow terminal.
const COLUMNS: [Column; 9] = [
    ("IOPS", 8, |it| count_text(it.requests_per_second)),
    ("MiB/S", 8, |it| format!("{:.1}", it.bytes_per_second / f64::from(1 << 20))),
    ("P99", 8, |it| latency_text(it.p99_us)),
    ("STATE", 9, |it| it.state.clone()),
    ("DEPTH", 6, |it| it.depth.to_string()),
    ("P50", 8, |it| latency_text(it.p50_us)),
    ("MAX", 8, |it| latency_text(it.max_us)),
    ("READ/S", 8, |it| count_text(it.reads_per_second)),
    ("WRITE/S", 8, |it| count_text(it.writes_per_second)),
];

/// The columns of a name at least.
const NAME_MIN: usize = 10;

/// Sorts the exports, the largest figure first.
pub(super) fn sort(exports: &mut [ExportFigures], key: SortKey) {
    let value = |export: &ExportFigures| match key {
        SortKey::Iops => export.requests_per_second,
        SortKey::Bandwidth => export.bytes_per_second,
        SortKey::P99 => export.p99_us.unwrap_or(0.0),
        #[expect(clippy::cast_precision_loss, reason = "it only orders")]
        SortKey::Depth => export.depth as f64,
        SortKey::Name => 0.0,
    };
    let by_value = |a: &ExportFigures, b: &ExportFigures| value(b).total_cmp(&value(a));
    exports.sort_by(|a, b| by_value(a, b).then_with(|| a.name.cmp(&b.name)));
}

/// The page of all exports.
pub(super) fn overview(figures: &Figures, key: SortKey, terminal: Terminal) -> String {
    let mut exports = figures.exports.clone();
    sort(&mut exports, key);
    let longest = exports.iter().map(|export| export.name.chars().count()).max().unwrap_or(0);
    let name = longest.clamp(NAME_MIN, terminal.columns.saturating_sub(9 * 3).max(NAME_MIN));
    let mut left = terminal.columns.saturating_sub(name);
    let fits = |(_, width, _): &&Column| {
        let is_room = left > *width;
        left = left.saturating_sub(width + 1);
        is_room
    };
    let columns: Vec<&Column> = COLUMNS.iter().take_while(fits).collect();
    // The sum of no numbers is -0.
    let rates = exports.iter().map(|export| export.requests_per_second);
    let total = rates.fold(0.0, |total: f64, rate| total + rate);
    let mut text = format!("exports: {}, {} requests/s", exports.len(), count_text(total));
    for thread in &figures.iothreads {
        let more =
            [(thread.poll_useless, "useless polling"), (thread.run_delay, "waiting for a CPU")];
        let more = more.into_iter().filter(|(share, _)| *share >= 0.01);
        let cpu = format!("{}: CPU {}", thread.name, percent(thread.cpu));
        let parts: Vec<String> = [cpu]
            .into_iter()
            .chain(more.map(|(share, what)| format!("{what} {}", percent(share))))
            .collect();
        let _ = write!(text, "\n{}", joined(&parts, terminal.columns));
    }
    let head = columns.iter().map(|(head, width, _)| format!(" {head:>width$}"));
    let _ = write!(text, "\n\n{:<name$}{}\n", "EXPORT", head.collect::<String>());
    let room = terminal.rows.saturating_sub(text.lines().count() + 1).max(1);
    for export in exports.iter().take(room) {
        let cells = columns.iter().map(|(_, width, cell)| format!(" {:>width$}", cell(export)));
        let line = format!("{:<name$}{}", cut(&export.name, name), cells.collect::<String>());
        let is_bad = !matches!(&*export.state, "serving" | "waiting");
        let _ = match is_bad && terminal.has_colours {
            true => writeln!(text, "\x1b[31m{line}\x1b[0m"),
            false => writeln!(text, "{line}"),
        };
    }
    if exports.len() > room {
        let _ = writeln!(text, "{} more", exports.len() - room);
    }
    text
}

/// The page of one export, with its last figures at the end of `history`.
pub(super) fn details(history: &VecDeque<ExportFigures>, terminal: Terminal) -> String {
    let Some(now) = history.back() else { return "no figures yet\n".to_owned() };
    let left = terminal.columns.saturating_sub(now.state.chars().count() + 2);
    let mut text = format!("{}: {}\n\n", cut(&now.name, left), now.state);
    let lines: [Line; 4] = [
        ("IOPS", count_text(now.requests_per_second), |it| it.requests_per_second),
        ("MiB/S", format!("{:.1}", now.bytes_per_second / f64::from(1 << 20)), |it| {
            it.bytes_per_second
        }),
        ("P99", latency_text(now.p99_us), |it| it.p99_us.unwrap_or(0.0)),
        ("MAX", latency_text(now.max_us), |it| it.max_us.unwrap_or(0.0)),
    ];
    for (head, value, of) in lines {
        let values: Vec<f64> = history.iter().map(of).collect();
        let room = terminal.columns.saturating_sub(17);
        let shown = &values[values.len().saturating_sub(room)..];
        let _ = writeln!(text, "{head:<6}{value:>9}  {}", sparkline(shown));
    }
    let depth = format!("{} ≤ {}", now.depth, now.depth_peak);
    let _ = writeln!(text, "{:<6}{depth:>9}\n", "DEPTH");
    let parts = [
        format!("reads {}/s", count_text(now.reads_per_second)),
        format!("writes {}/s", count_text(now.writes_per_second)),
        format!("errors {}/s", count_text(now.errors_per_second)),
        format!("{:.1} wait for limits", now.throttled),
    ];
    let _ = writeln!(text, "{}\n", joined(&parts, terminal.columns));
    let left = terminal.rows.saturating_sub(text.lines().count());
    text + &histogram(&now.buckets, Terminal { rows: left, ..terminal })
}

/// Parts of a line, with a new line where the next part would not fit.
fn joined(parts: &[String], columns: usize) -> String {
    let (mut text, mut used) = (String::new(), 0);
    for part in parts {
        let width = part.chars().count();
        // A comma may follow.
        let fits = used + 2 + width < columns;
        let (before, begin) = match used {
            0 => ("", 0),
            _ if fits => (", ", used + 2),
            _ => (",\n  ", 2),
        };
        text += before;
        text += part;
        used = begin + width;
    }
    text
}

/// A bar for each bucket from the first to the last one with a request. On a terminal with few
/// rows, the first bar has the requests of all shorter latencies.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a bar is approximate"
)]
fn histogram(buckets: &[u64], terminal: Terminal) -> String {
    let hit = |index: &usize| buckets[*index] > 0;
    let all = 0..buckets.len();
    let (first, last) = (all.clone().find(hit), all.rev().find(hit));
    let (Some(first), Some(last)) = (first, last) else {
        return "no request in this interval\n".to_owned();
    };
    let first = first.max((last + 1).saturating_sub(terminal.rows.max(1)));
    let mut buckets = buckets.to_vec();
    buckets[first] = buckets[..=first].iter().sum();
    let most = buckets[first..].iter().copied().max().unwrap_or(1).max(1);
    let room = terminal.columns.saturating_sub(24).max(1);
    let mut text = String::new();
    for (index, count) in buckets.iter().enumerate().take(last + 1).skip(first) {
        let bound = match index {
            LATENCY_BOUNDS => "more".to_owned(),
            _ => format!("< {}", latency_text(Some(latency_bound_ns(index) as f64 / 1e3))),
        };
        let bar = "█".repeat((*count as f64 / most as f64 * room as f64).ceil() as usize);
        let _ = writeln!(text, "{bound:>12} {:>9}  {bar}", count_text(*count as f64));
    }
    text
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a sparkline has eight levels"
)]
fn sparkline(values: &[f64]) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = values.iter().copied().fold(0.0, f64::max);
    let level = |value: &f64| match most > 0.0 {
        true => LEVELS[((value / most * 7.0).round() as usize).min(7)],
        false => LEVELS[0],
    };
    values.iter().map(level).collect()
}

/// A latency in at most seven columns.
fn latency_text(us: Option<f64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us) if us < 99.95 => format!("{us:.1} µs"),
        Some(us) if us < 999.5 => format!("{us:.0} µs"),
        Some(us) if us < 99_950.0 => format!("{:.1} ms", us / 1e3),
        Some(us) if us < 999_500.0 => format!("{:.0} ms", us / 1e3),
        Some(us) => format!("{:.1} s", us / 1e6),
    }
}

/// A number in at most six columns.
fn count_text(count: f64) -> String {
    match count {
        count if count < 9.95 && count.fract() > 0.0 => format!("{count:.1}"),
        count if count < 99_999.5 => format!("{count:.0}"),
        count if count < 999_500.0 => format!("{:.0}k", count / 1e3),
        count => format!("{:.1}M", count / 1e6),
    }
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// The text in at most `width` columns, without control characters.
fn cut(text: &str, width: usize) -> String {
    let text = redact::printable(text).to_string();
    if text.chars().count() <= width {
        return text;
    }
    let start: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{start}…")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ctl::top::figures::ThreadFigures;

    fn export(name: &str, iops: f64, p99_us: f64) -> ExportFigures {
        let mut buckets = vec![0; LATENCY_BOUNDS + 1];
        (buckets[2], buckets[4]) = (30, 10);
        ExportFigures {
            name: name.to_owned(),
            state: "serving".to_owned(),
            connected: true,
            requests_per_second: iops,
            reads_per_second: iops,
            writes_per_second: 0.0,
            bytes_per_second: iops * 4096.0,
            errors_per_second: 0.0,
            p50_us: Some(9.0),
            p99_us: Some(p99_us),
            max_us: Some(1_234.0),
            depth: 3,
            depth_peak: 9,
            throttled: 0.0,
            buckets,
        }
    }

    fn figures() -> Figures {
        let late = ExportFigures { state: "late".to_owned(), ..export("b", 20.0, 70.0) };
        let name = "iothread-0".to_owned();
        let thread = ThreadFigures { name, cpu: 0.79, poll_useless: 0.125, run_delay: 0.004 };
        let exports = vec![export("a", 10.0, 80.0), late];
        Figures { seconds: 1.0, exports, iothreads: vec![thread] }
    }

    const WIDE: Terminal = Terminal { columns: 120, rows: 40, has_colours: true };

    #[test]
    fn counts_fit_in_their_columns() {
        for (count, text) in [
            (0.0, "0"),
            (9.0, "9"),
            (9.94, "9.9"),
            (9.95, "10"),
            (99_999.4, "99999"),
            (99_999.5, "100k"),
            (999_499.0, "999k"),
            (999_500.0, "1.0M"),
            (12_340_000.0, "12.3M"),
        ] {
            assert_eq!(count_text(count), text, "{count}");
        }
    }

    /// Each key of the keyboard gives another order.
    #[test]
    fn exports_have_the_order_of_the_key() {
        let of = |name: &str, [iops, bandwidth, p99, depth]: [u32; 4]| ExportFigures {
            bytes_per_second: bandwidth.into(),
            depth: depth.into(),
            ..export(name, iops.into(), p99.into())
        };
        let all = [of("a", [1, 3, 2, 1]), of("b", [2, 2, 3, 3]), of("c", [3, 1, 1, 2])];
        for (key, expected) in [(b'i', "cba"), (b'b', "abc"), (b'p', "bac"), (b'd', "bca")] {
            let mut exports = all.clone();
            sort(&mut exports, SortKey::from_key(key).unwrap());
            let order: String = exports.iter().map(|export| &*export.name).collect();
            assert_eq!(order, expected, "{key}");
        }
        let mut exports = all;
        exports.reverse();
        sort(&mut exports, SortKey::from_key(b'n').unwrap());
        assert_eq!(exports.map(|export| export.name), ["a", "b", "c"]);
        assert_eq!(SortKey::from_key(b'x'), None);
        assert_eq!(SortKey::keyboard(), "i b p d n");
    }

    #[test]
    fn an_io_thread_has_its_share_of_cpu_time_and_what_is_not_small() {
        let page = overview(&figures(), SortKey::Name, WIDE);
        assert!(page.contains("\niothread-0: CPU 79%, useless polling 12%\n"), "{page}");
    }

    #[test]
    fn exports_of_one_figure_have_the_order_of_their_names() {
        let mut exports = ["c", "a", "b"].map(|name| export(name, 1.0, 1.0));
        sort(&mut exports, SortKey::Depth);
        assert_eq!(exports.map(|export| export.name), ["a", "b", "c"]);
    }

    #[test]
    fn a_histogram_has_a_bar_from_the_first_to_the_last_request() {
        let mut buckets = vec![0; LATENCY_BOUNDS + 1];
        (buckets[2], buckets[4]) = (30, 10);
        let bars = histogram(&buckets, WIDE);
        let counts: Vec<&str> =
            bars.lines().map(|line| line.split_whitespace().nth(3).unwrap()).collect();
        assert_eq!(counts, ["30", "0", "10"], "{bars}");
        buckets[LATENCY_BOUNDS] = 1;
        let bars = histogram(&buckets, WIDE);
        assert!(bars.lines().last().unwrap().trim_start().starts_with("more"), "{bars}");
    }

    #[test]
    fn a_line_is_never_wider_than_the_terminal() {
        let long = export(&"x".repeat(70), 123_456.0, 9_999_999.0);
        let mut figures = Figures { exports: vec![long.clone()], ..figures() };
        figures.iothreads[0].run_delay = 0.5;
        let history = (0..HISTORY_MAX).map(|_| long.clone()).collect();
        for columns in [30, 40, 60, 80, 120, 200] {
            let terminal = Terminal { columns, rows: 24, has_colours: false };
            let pages = [overview(&figures, SortKey::Iops, terminal), details(&history, terminal)];
            for line in pages.iter().flat_map(|page| page.lines()) {
                assert!(line.chars().count() <= columns, "{columns}: {line}");
            }
            assert!(pages[0].contains("waiting for a CPU 50%"), "{}", pages[0]);
            assert!(pages[1].contains("0.0 wait for limits"), "{}", pages[1]);
        }
    }

    /// A usual terminal has room for all of it.
    #[test]
    fn the_page_of_an_export_has_a_minute_and_a_histogram() {
        let history: VecDeque<_> =
            (0..60).map(|second| export("a", f64::from(second), 80.0)).collect();
        let terminal = Terminal { columns: 80, rows: 21, has_colours: false };
        let page = details(&history, terminal);
        for head in ["IOPS", "MiB/S", "P99", "MAX"] {
            let line = page.lines().find(|line| line.starts_with(head)).unwrap();
            let levels = line.chars().filter(|letter| ('▁'..='█').contains(letter)).count();
            assert_eq!(levels, HISTORY_MAX, "{line}");
        }
        let iops = page.lines().find(|line| line.starts_with("IOPS")).unwrap();
        assert!(iops.contains(" 59  ▁") && iops.ends_with('█'), "{iops}");
        assert!(page.contains("< 16.4 µs        30"), "{page}");
    }

    /// The first bar has the rest.
    #[test]
    fn a_histogram_ends_above_the_last_row() {
        let mut wide = export("a", 1.0, 1.0);
        wide.buckets = vec![1; LATENCY_BOUNDS + 1];
        let terminal = Terminal { rows: 21, ..WIDE };
        let page = details(&[wide].into_iter().collect(), terminal);
        assert_eq!(page.lines().count(), 21, "{page}");
        let count = |line: &str| match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["<", _, _, count, ..] | ["more", count, ..] => count.parse::<usize>().ok(),
            _ => None,
        };
        assert_eq!(page.lines().filter_map(count).sum::<usize>(), LATENCY_BOUNDS + 1, "{page}");
    }

    #[test]
    fn a_bad_state_has_a_colour_where_the_terminal_has_some() {
        let page = overview(&figures(), SortKey::Name, WIDE);
        let coloured: Vec<&str> = page.lines().filter(|line| line.contains("\x1b[31m")).collect();
        assert!(matches!(coloured[..], [line] if line.contains("late")), "{page}");
        let plain = Terminal { has_colours: false, ..WIDE };
        assert!(!overview(&figures(), SortKey::Name, plain).contains('\x1b'));
    }

    #[test]
    fn no_exports_make_no_requests() {
        let page = overview(&Figures { exports: Vec::new(), ..figures() }, SortKey::Name, WIDE);
        assert!(page.starts_with("exports: 0, 0 requests/s\n"), "{page}");
    }

    #[test]
    fn exports_beyond_the_last_row_are_counted() {
        let exports = (0..9).map(|number| export(&number.to_string(), 1.0, 1.0)).collect();
        let terminal = Terminal { rows: 9, ..WIDE };
        let page = overview(&Figures { exports, ..figures() }, SortKey::Name, terminal);
        assert!(page.ends_with("5 more\n") && page.lines().count() == 9, "{page}");
    }

    #[test]
    fn numbers_and_latencies_are_short() {
        let counts = [0.0, 0.5, 12.4, 99_999.0, 123_456.0, 2_500_000.0].map(count_text);
        assert_eq!(counts, ["0", "0.5", "12", "99999", "123k", "2.5M"]);
        let latencies =
            [4.1, 250.0, 1_234.0, 250_000.0, 7_000_000.0].map(|us| latency_text(Some(us)));
        assert_eq!(latencies, ["4.1 µs", "250 µs", "1.2 ms", "250 ms", "7.0 s"]);
    }

    #[test]
    fn control_characters_of_a_name_do_not_reach_the_terminal() {
        let history = [export("a\x1b[2Jb", 1.0, 1.0)].into_iter().collect();
        let page = details(&history, WIDE);
        assert!(!page.contains('\x1b'), "{page:?}");
    }
}
