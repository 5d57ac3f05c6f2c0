//! The figures as Markdown and JSON.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::heatmap;
use super::plan::{ADAPTIVE, ALONE, Load, SETTINGS};
use super::verdict::{
    CPU, CPU_MOST, IOPS, LATENCY_MOST, MEAN, NEVER_UNDER, OpenOutcome, Outcome, P99, PER_CALL,
    USUALLY, median, requirements, worst,
};
use crate::rig::machine::Machine;
use crate::rig::spread::{Spread, number, show};
use crate::rig::targets::Target;

const INTRODUCTION: &str = "\
The setting of `ringhaul serve` that adapts itself (the default) against eight fixed ones. In each
cell all settings take turns within a round, by servers that run from the first cell of a disk to
the last. The best fixed setting of a cell has the highest median of IOPS; among those within 3% of
it, it is the one that takes the least CPU time. Ratios are taken within a round, to the best of the
other rounds, as the best of a round is in part the luckiest; medians are followed by the least and
the greatest. What misses a limit is in bold.
";

/// The number of cells in the list of the worst.
const WORST: usize = 10;

/// The complete result.
pub(super) struct Runs {
    machine: Machine,
    commands: Vec<String>,
    notes: Vec<(Target, String)>,
    pub(super) outcomes: Vec<Outcome>,
    pub(super) open: Vec<OpenOutcome>,
    /// The reason why the result is not complete.
    pub(super) ended: Option<String>,
}

impl Runs {
    pub(super) fn new(machine: Machine, commands: Vec<String>) -> Self {
        let (notes, outcomes, open) = (Vec::new(), Vec::new(), Vec::new());
        Self { machine, commands, notes, outcomes, open, ended: None }
    }

    /// Adds a disk's description, or the reason why it was skipped.
    pub(super) fn note(&mut self, target: Target, note: String) {
        self.notes.push((target, note));
    }

    /// Returns names and contents of the files.
    pub(super) fn files(&self) -> Result<[(&'static str, String); 3]> {
        let json = serde_json::to_string_pretty(&self.json()).context("encoding the result")?;
        let mut markdown = String::new();
        self.markdown(&mut markdown).context("writing the tables")?;
        Ok([
            ("runs.md", markdown),
            ("runs.json", json + "\n"),
            ("runs.svg", heatmap::draw(&self.outcomes)),
        ])
    }

    fn markdown(&self, out: &mut String) -> fmt::Result {
        writeln!(out, "# The adaptive setting against fixed ones\n\n{INTRODUCTION}")?;
        if let Some(why) = &self.ended {
            writeln!(out, "**Not complete**: {why}.\n")?;
        }
        writeln!(out, "![ratios as colours](runs.svg)\n\n## Summary\n")?;
        for requirement in requirements(&self.outcomes, &self.open) {
            let reached = match requirement.reached {
                Some(true) => "reached",
                Some(false) => "**not reached**",
                None => "not measured",
            };
            let found = match requirement.reached {
                Some(_) => format!(", {}", requirement.found),
                None => String::new(),
            };
            writeln!(out, "- {}: {reached}{found}", requirement.text)?;
        }
        self.write_medians(out)?;
        if !self.outcomes.is_empty() {
            write_worst(out, &self.outcomes)?;
            write_settings(out, &self.outcomes)?;
        }
        for target in Target::ALL {
            for load in Load::ALL {
                let inside = |one: &&Outcome| (one.cell.target, one.cell.load) == (target, load);
                let cells: Vec<_> = self.outcomes.iter().filter(inside).collect();
                if !cells.is_empty() {
                    write_table(out, &format!("{target}, {load}"), &cells)?;
                }
            }
        }
        if !self.open.is_empty() {
            write_open_loop(out, &self.open)?;
        }
        writeln!(out, "\n## The machine and the disks\n")?;
        for (name, value) in &self.machine.facts {
            writeln!(out, "- {name}: {value}")?;
        }
        for (target, note) in &self.notes {
            writeln!(out, "- {target}: {note}")?;
        }
        writeln!(out, "\nThe servers, and one load of each kind:\n\n```")?;
        self.commands.iter().try_for_each(|line| writeln!(out, "{line}"))?;
        writeln!(out, "```")
    }

    /// Writes a line for all cells, and a line for each disk.
    fn write_medians(&self, out: &mut String) -> fmt::Result {
        write_median(out, "all disks", &self.outcomes.iter().collect::<Vec<_>>())?;
        Target::ALL.iter().try_for_each(|target| {
            let cells = self.outcomes.iter().filter(|one| one.cell.target == *target);
            write_median(out, &target.to_string(), &cells.collect::<Vec<_>>())
        })
    }

    fn json(&self) -> Value {
        let worst = worst(&self.outcomes, WORST).into_iter();
        let worst = worst.map(|one| (one.cell.to_string(), one.iops_ratio()));
        let notes = self.notes.iter().map(|(target, note)| (target.to_string(), note));
        json!({
            "machine": self.machine.facts.iter().cloned().collect::<BTreeMap<_, _>>(),
            "ended_early": self.ended,
            "disks": notes.collect::<BTreeMap<_, _>>(),
            "commands": self.commands,
            "requirements": requirements(&self.outcomes, &self.open),
            "worst": worst.collect::<Vec<_>>(),
            "cells": self.outcomes.iter().map(cell_json).collect::<Vec<_>>(),
            "open_loop": self.open.iter().map(open_json).collect::<Vec<_>>(),
        })
    }
}

/// Makes a figure bold if it misses its limit.
fn bold(text: String, good: bool) -> String {
    if good { text } else { format!("**{text}**") }
}

fn show_ratio(ratio: Option<Spread>, good: impl Fn(f64) -> bool) -> String {
    bold(show(ratio), ratio.is_some_and(|ratio| good(ratio.median)))
}

fn show_number(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), number)
}

fn write_median(out: &mut String, name: &str, cells: &[&Outcome]) -> fmt::Result {
    let medians = |ratio: fn(&Outcome) -> Option<f64>| {
        show(Spread::of(cells.iter().filter_map(|one| ratio(one))))
    };
    let (iops, cpu) = (medians(Outcome::iops_ratio), medians(Outcome::cpu_ratio));
    match cells.len() {
        0 => Ok(()),
        count => writeln!(out, "- {name}, {count} cells: IOPS {iops} times, CPU time {cpu} times"),
    }
}

fn write_worst(out: &mut String, outcomes: &[Outcome]) -> fmt::Result {
    let count = WORST.min(outcomes.len());
    writeln!(out, "\nThe worst {count} cells:\n")?;
    for one in worst(outcomes, WORST) {
        let ratio = show_ratio(one.to_best(ADAPTIVE, IOPS), |ratio| ratio >= USUALLY);
        let best = one.best().map_or("nothing".to_owned(), |place| SETTINGS[place].to_string());
        writeln!(out, "- {}: {ratio} times {best}", one.cell)?;
    }
    Ok(())
}

/// Writes the ratios that each setting would reach in all cells.
fn write_settings(out: &mut String, outcomes: &[Outcome]) -> fmt::Result {
    writeln!(
        out,
        "\n## Each setting in all cells\n\nMedians of cells, the least and the greatest; all as \
         times the best fixed setting's of the cell.\n\n\
         | setting | best fixed one in | at least {USUALLY} in | at least {NEVER_UNDER} in | IOPS \
         | CPU time |\n|---|--:|--:|--:|---|---|"
    )?;
    for (place, setting) in SETTINGS.iter().enumerate() {
        let medians = |figure| {
            let of = |one: &Outcome| one.to_best(place, figure).map(|spread| spread.median);
            outcomes.iter().filter_map(of).collect::<Vec<f64>>()
        };
        let iops = medians(IOPS);
        let count = |limit| iops.iter().filter(|ratio| **ratio >= limit).count();
        let best = match place {
            ADAPTIVE => "–".to_owned(),
            _ => outcomes.iter().filter(|one| one.best() == Some(place)).count().to_string(),
        };
        let (usually, never) = (count(USUALLY), count(NEVER_UNDER));
        let [iops, cpu] = [iops, medians(CPU)].map(|medians| show(Spread::of(medians)));
        writeln!(out, "| {setting} | {best} | {usually} | {never} | {iops} | {cpu} |")?;
    }
    Ok(())
}

fn write_table(out: &mut String, title: &str, cells: &[&Outcome]) -> fmt::Result {
    writeln!(
        out,
        "\n## {title}\n\n\
         | driver | depth | IOPS | best fixed setting | its IOPS | IOPS, times the best \
         | CPU time, times the best | completions per call |\n|---|--:|--:|---|--:|---|---|--:|"
    )?;
    for one in cells {
        let adaptive = &one.series[ADAPTIVE];
        let best = one.best();
        let best_iops = best.and_then(|place| median(&one.series[place], IOPS));
        writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            one.cell.driver,
            one.cell.depth,
            show_number(median(adaptive, IOPS)),
            best.map_or("–".to_owned(), |place| SETTINGS[place].to_string()),
            show_number(best_iops),
            show_ratio(one.to_best(ADAPTIVE, IOPS), |ratio| ratio >= USUALLY),
            show_ratio(one.to_best(ADAPTIVE, CPU), |ratio| ratio <= CPU_MOST),
            show_number(median(adaptive, PER_CALL)),
        )?;
    }
    Ok(())
}

fn write_open_loop(out: &mut String, open: &[OpenOutcome]) -> fmt::Result {
    writeln!(
        out,
        "\n## Open loop\n\nRequests come at random times (a Poisson process), at a share of the \
         adaptive setting's median rate at depth 32 with a driver that sleeps. The other setting \
         is {}, which serves each request on its own. Latencies are in µs, from when a request was \
         to be made.\n\n\
         | disk | share | IOPS asked | IOPS reached | mean | mean of the other | mean, times \
         | p99 | p99 of the other | p99, times |\n|---|--:|--:|--:|--:|--:|---|--:|--:|---|",
        SETTINGS[ALONE]
    )?;
    for one in open {
        let (target, share) = (one.cell.target, one.cell.share);
        let (asked, reached) = (number(one.rate), show_number(median(&one.adaptive, IOPS)));
        write!(out, "| {target} | {share}% | {asked} | {reached} |")?;
        for figure in [MEAN, P99] {
            let [ours, others] = [&one.adaptive, &one.alone].map(|all| median(all, figure));
            let ratio = show_ratio(one.ratio(figure), |ratio| ratio <= LATENCY_MOST);
            write!(out, " {} | {} | {ratio} |", show_number(ours), show_number(others))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn cell_json(one: &Outcome) -> Value {
    let samples = SETTINGS.iter().zip(&one.series);
    let samples = samples.map(|(setting, samples)| (setting.to_string(), samples));
    json!({
        "name": one.cell.to_string(),
        "target": one.cell.target,
        "load": one.cell.load.to_string(),
        "driver": one.cell.driver.to_string(),
        "depth": one.cell.depth,
        "best_fixed": one.best().map(|place| SETTINGS[place].to_string()),
        "iops_ratio": one.to_best(ADAPTIVE, IOPS),
        "cpu_ratio": one.to_best(ADAPTIVE, CPU),
        "samples": samples.collect::<BTreeMap<_, _>>(),
    })
}

fn open_json(one: &OpenOutcome) -> Value {
    let samples = [(ADAPTIVE, &one.adaptive), (ALONE, &one.alone)];
    let samples = samples.map(|(place, samples)| (SETTINGS[place].to_string(), samples));
    json!({
        "name": one.cell.to_string(),
        "target": one.cell.target,
        "share_percent": one.cell.share,
        "rate_iops": one.rate,
        "latency_mean_ratio": one.ratio(MEAN),
        "latency_p99_ratio": one.ratio(P99),
        "samples": BTreeMap::from(samples),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::verdict::tests::{open, outcome};

    fn runs() -> Runs {
        let machine = Machine { facts: vec![("wake-up", "5 µs".to_owned())] };
        let mut runs = Runs::new(machine, vec!["ringhaul serve".to_owned()]);
        runs.note(Target::Zram, "memory".to_owned());
        runs.outcomes.push(outcome(1, (100.0, 2.0), &[(ALONE, 125.0, 1.0)]));
        runs.outcomes.push(outcome(8, (110.0, 2.0), &[]));
        runs.open.push(open(&[110.0; 3], &[100.0; 3]));
        runs
    }

    #[test]
    fn the_markdown_has_a_row_for_each_cell_and_says_what_is_reached() {
        let [(_, text), ..] = runs().files().unwrap();
        for part in [
            "- IOPS at least 0.95 times the best fixed setting's in nine of ten cells: **not \
             reached**, in 1 of 2; at depth 1, where nothing is decided, in 0 of 1; less in every \
             round in 1\n",
            "- zram, 2 cells: IOPS 0.95 (0.80–1.10) times, CPU time 1.50 (1.00–2.00) times\n",
            "The worst 2 cells:\n\n- zram/randread-depth-1-sleeping: **0.80** times run-max 1 \
             notify-batch off\n- zram/randread-depth-8-sleeping: 1.10 times",
            "| adaptive | – | 1 | 1 | 0.95 (0.80–1.10) | 1.50 (1.00–2.00) |",
            "| run-max 1 notify-batch off | 1 | 2 | 2 | 1.00 | 1.00 |",
            "## zram, randread\n",
            "| sleeping | 1 | 100 | run-max 1 notify-batch off | 125 | **0.80** | **2.00** | 4.00",
            "| sleeping | 8 | 110 | run-max 1 notify-batch on | 100 | 1.10 | 1.00 | 4.00 |\n",
            "| zram | 30% | 300 | 9091 | 110 | 100 | **1.10** | 220 | 200 | **1.10** |",
            "- wake-up: 5 µs\n- zram: memory\n",
            "```\nringhaul serve\n```",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert!(!text.contains("## zram, randrw") && !text.contains("Not complete"), "{text}");
    }

    #[test]
    fn the_json_has_every_sample() {
        let [_, (_, json), (_, svg)] = runs().files().unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        let cell = &json["cells"][0];
        assert_eq!(cell["samples"].as_object().unwrap().len(), SETTINGS.len());
        assert_eq!(cell["samples"]["run-max 1 notify-batch off"][2]["iops"], 125.0);
        assert_eq!(cell["samples"]["adaptive"][2]["iops"], 100.0);
        assert_eq!(cell["iops_ratio"]["median"], 0.8);
        assert_eq!(json["worst"][0][0], "zram/randread-depth-1-sleeping");
        assert_eq!(json["requirements"][0]["reached"], false);
        assert_eq!(json["open_loop"][0]["samples"]["adaptive"].as_array().unwrap().len(), 3);
        assert_eq!(json["machine"]["wake-up"], "5 µs");
        assert!(svg.contains("zram, randread"), "{svg}");
    }

    #[test]
    fn what_ended_early_is_written_and_says_so() {
        let mut runs = runs();
        (runs.outcomes, runs.open) = (Vec::new(), Vec::new());
        runs.ended = Some("the disk went away".to_owned());
        let [(_, text), (_, json), _] = runs.files().unwrap();
        assert!(text.contains("**Not complete**: the disk went away."), "{text}");
        assert_eq!(text.matches(": not measured\n").count(), 4, "{text}");
        assert!(json.contains("\"ended_early\": \"the disk went away\""), "{json}");
    }
}
