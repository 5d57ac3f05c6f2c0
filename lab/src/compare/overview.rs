//! The table of docs/internals/performance.md: Ringhaul without options, against the rival.

use super::plan::Workload;
use super::report::{Cell, Series};
use super::servers::Server;
use crate::charts;
use crate::rig::load::Load;
use crate::rig::spread::show;
use crate::rig::targets::Target;

/// Formats the table. Figures that Ringhaul loses are bold.
pub(super) fn table(cells: &[Cell]) -> String {
    let head = format!(
        "{} QSD | times QSD | by rounds | of fio | CPU time | system calls |\n\
         |---|---|--:|---|--:|--:|--:|--:|--:|",
        charts::HEAD
    );
    let idle = cells.iter().filter(|cell| cell.workload.beside == Load::Nothing);
    let rows = idle.filter_map(row);
    [head].into_iter().chain(rows).map(|line| line + "\n").collect()
}

/// Formats IOPS and 99th percentile beside each load, as multiples of the best setting of the
/// rival. Empty if nothing was measured beside a load.
pub(super) fn busy_table(cells: &[Cell]) -> String {
    let mut rows: Vec<(Target, Workload)> = Vec::new();
    for cell in cells.iter().filter(|cell| cell.workload.beside != Load::Nothing) {
        let row = (cell.target, Workload { beside: Load::Nothing, ..cell.workload });
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let columns = Load::BUSY.map(|load| format!("{load}: IOPS | p99")).join(" | ");
    let head = format!(
        "| disk | workload | {columns} |\n|---|---|{}\n",
        "--:|--:|".repeat(Load::BUSY.len())
    );
    let rows = rows.into_iter().map(|(target, workload)| {
        let at = |load| {
            let wanted = Workload { beside: load, ..workload };
            let is_it = |cell: &&Cell| cell.target == target && cell.workload == wanted;
            cells.iter().find(is_it).map_or_else(|| "– | –".to_owned(), busy_columns)
        };
        let columns = Load::BUSY.map(at).join(" | ");
        format!("| {target} | {} | {columns} |\n", workload.to_string().replace('-', " "))
    });
    head + &rows.collect::<String>()
}

fn busy_columns(cell: &Cell) -> String {
    let (Some(ours), Some(rival)) = (cell.ours().next(), cell.best_rival()) else {
        return "– | –".to_owned();
    };
    let iops = cell.by_rounds(ours, rival);
    let p99 = cell.p99_by_rounds(ours, rival);
    let iops = mark(show(iops), iops.is_some_and(|spread| spread.median < 1.0));
    let p99 = mark(show(p99), p99.is_some_and(|spread| spread.median > 1.0));
    format!("{iops} | {p99}")
}

fn row(cell: &Cell) -> Option<String> {
    let (ours, rival) = (cell.ours().next()?, cell.best_rival()?);
    let quotient = |ours: Option<f64>, theirs: Option<f64>| {
        let theirs = theirs.filter(|theirs| *theirs > 0.0)?;
        Some(ours? / theirs)
    };
    let iops = |series: &Series| Some(series.iops());
    let cpu = |series: &Series| {
        series.spread(|sample| sample.server_cpu_us_per_io).map(|spread| spread.median)
    };
    let fio = cell.series.iter().find(|one| matches!(one.server, Server::Fio("io_uring" | "rbd")));
    let of_fio = fio.and_then(|fio| quotient(iops(ours), iops(fio)));
    let by_rounds = cell.by_rounds(ours, rival);
    let columns = [
        cell.target.to_string(),
        cell.workload.to_string().replace('-', " "),
        format!("{:.0}", ours.iops() / 1e3),
        rival.server.to_string().replace("QSD ", ""),
        figure(quotient(iops(ours), iops(rival)), |ratio| ratio < 1.0),
        mark(show(by_rounds), by_rounds.is_some_and(|spread| spread.median < 1.0)),
        of_fio.map_or_else(|| "–".to_owned(), |part| format!("{:.0}%", part * 100.0)),
        figure(quotient(cpu(ours), cpu(rival)), |ratio| ratio > 1.0),
        figure(quotient(ours.system_calls_per_io, rival.system_calls_per_io), |ratio| ratio > 1.0),
    ];
    Some(format!("| {} |", columns.join(" | ")))
}

fn figure(value: Option<f64>, is_loss: impl Fn(f64) -> bool) -> String {
    value.map_or_else(|| "–".to_owned(), |value| mark(format!("{value:.2}"), is_loss(value)))
}

fn mark(text: String, is_loss: bool) -> String {
    if is_loss { format!("**{text}**") } else { text }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::comparison;
    use super::*;

    #[test]
    fn the_charts_can_parse_the_table() {
        let text = table(&comparison().cells);
        let row = "| zram | randread 4k depth 64 | 0 | aio=native | 3.00 | 2.00 (1.00–3.00) | – | \
                   1.00 | 1.00 |";
        assert!(text.ends_with(&format!("{row}\n")), "{text}");
        assert_eq!(charts::rows(&text).unwrap().len(), 1);
    }

    #[test]
    fn a_row_has_a_column_for_each_load() {
        let mut comparison = comparison();
        assert_eq!(busy_table(&comparison.cells), "");
        comparison.cells[0].workload.beside = Load::Loops(8);
        let text = busy_table(&comparison.cells);
        let row = "| zram | randread 4k depth 64 | – | – | 2.00 (1.00–3.00) | 0.50 (0.33–1.00) \
                   | – | – |";
        assert!(text.ends_with(&format!("{row}\n")), "{text}");
        assert!(!table(&comparison.cells).contains("randread"), "the idle host has a table alone");
    }

    #[test]
    fn losses_are_bold() {
        assert_eq!(figure(Some(0.954), |ratio| ratio < 1.0), "**0.95**");
        assert_eq!(figure(Some(2.4), |ratio| ratio < 1.0), "2.40");
        assert_eq!(figure(None, |_| true), "–");
    }
}
