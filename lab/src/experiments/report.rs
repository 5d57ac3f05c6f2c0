//! The figures in words, tables and pictures.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Serialize;

use super::document::{Block, Plot, markdown};
use super::page::page;
use super::plan::{Cell, EXPERIMENTS, Experiment, FILE_SERVER, Through};
use super::plot::{self, Row};
use super::run::{Outcome, Side, commands};
use super::sample::{LATENCY_PERCENTILES, SIZE_PERCENTILES};
use super::verdict::{self, HARVESTED_P50, P99};
use crate::rig::machine::Machine;
use crate::rig::spread::{Spread, number};
use crate::rig::targets::Target;

const TITLE: &str = "Ringhaul: what each step is worth";

const INTRODUCTION: &str = "Each step that saves system calls or waiting can be switched off. Here \
    it is off and on in turn, on the same disks, under the same load, in the same minutes, and \
    ratios are taken within a round. Medians are followed by the least and the greatest. A change \
    counts as an effect if it is 2% or more and all rounds but one in seven agree on its \
    direction; else there is no effect here, and the reason is given where the figures show one.";

const COLUMNS: &str = "Latencies of an engine alone are from the submit of an operation to the \
    harvest that found it, except where submits are switched, as waiting for a submit counts \
    there; there and through the daemon they are from queueing a request to finding it done. CPU \
    time is that of the process that does the I/O. Completions at once are those that one harvest \
    has found. System calls of a daemon are counted in runs of their own.";

/// The complete result.
pub(super) struct Experiments {
    machine: Machine,
    pub(super) targets: Vec<TargetNote>,
    pub(super) outcomes: Vec<Outcome>,
    /// The reason why the result is not complete.
    pub(super) ended: Option<String>,
}

/// The description of a disk.
#[derive(Serialize)]
pub(super) struct TargetNote {
    pub(super) target: Target,
    pub(super) description: String,
}

impl Experiments {
    pub(super) fn new(machine: Machine) -> Self {
        Self { machine, targets: Vec::new(), outcomes: Vec::new(), ended: None }
    }

    /// Returns names and contents of the files.
    pub(super) fn files(&self) -> Result<[(&'static str, String); 3]> {
        let blocks = self.blocks()?;
        let json = serde_json::to_string_pretty(&self.json()).context("encoding the result")?;
        Ok([
            ("report.html", page(TITLE, &blocks)),
            ("experiments.md", format!("# {TITLE}\n{}", markdown(&blocks))),
            ("experiments.json", json + "\n"),
        ])
    }

    fn json(&self) -> serde_json::Value {
        let outcomes: Vec<_> = self.outcomes.iter().map(outcome_json).collect();
        serde_json::json!({
            "machine": self.machine.facts.iter().cloned().collect::<BTreeMap<_, _>>(),
            "ended_early": self.ended,
            "targets": self.targets,
            "latency_percentiles": LATENCY_PERCENTILES.map(|(_, percent)| percent),
            "harvested_at_once_percentiles": SIZE_PERCENTILES.map(|at| at.replace('_', ".")),
            "cells": outcomes,
        })
    }

    fn blocks(&self) -> Result<Vec<Block>> {
        let mut blocks = vec![Block::Paragraph(INTRODUCTION.to_owned())];
        if let Some(reason) = &self.ended {
            blocks.push(Block::Paragraph(format!("This report is not complete: {reason}.")));
        }
        for experiment in &EXPERIMENTS {
            let outcomes = self.outcomes.iter();
            let outcomes: Vec<_> =
                outcomes.filter(|one| one.cell.experiment == experiment.number).collect();
            if !outcomes.is_empty() {
                blocks.extend(section(experiment, &outcomes)?);
            }
        }
        blocks.push(Block::Heading(2, "The machine and the disks".to_owned()));
        let facts = self.machine.facts.iter().map(|(name, value)| format!("{name}: {value}"));
        let disks =
            self.targets.iter().map(|note| format!("{}: {}", note.target, note.description));
        blocks.push(Block::List(facts.chain(disks).collect()));
        blocks.push(Block::Paragraph(COLUMNS.to_owned()));
        Ok(blocks)
    }
}

fn section(experiment: &Experiment, outcomes: &[&Outcome]) -> Result<Vec<Block>> {
    let Experiment { number, title, tests, credit, sides } = experiment;
    let mut blocks = vec![
        Block::Heading(2, format!("{number}. {title}")),
        Block::Paragraph((*tests).to_owned()),
        Block::Paragraph(format!("Where the idea was first described: {credit}")),
        Block::Paragraph(format!("Switches: {sides}.")),
    ];
    let loaded: Vec<_> =
        outcomes.iter().copied().filter(|one| one.cell.through != Through::IdleDaemon).collect();
    if !loaded.is_empty() {
        blocks.push(Block::Paragraph(verdict::summary(&loaded)));
        blocks.push(figures(&loaded));
        blocks.extend(pictures(*number, &loaded)?);
    }
    blocks.push(Block::Heading(3, "What shows, what does not, and why".to_owned()));
    blocks.push(findings(outcomes));
    if *number == 2 {
        blocks.push(batch_table(&loaded));
        blocks.push(percentile_table(&loaded));
    }
    let lines = outcomes.iter().flat_map(|outcome| {
        let cell = &outcome.cell;
        let comment = format!("# {}: off, then on", cell.name());
        let both = commands(cell, cell.off).into_iter().chain(commands(cell, cell.on));
        [comment].into_iter().chain(both)
    });
    let title = format!("Commands of experiment {number}");
    blocks.push(Block::Commands { title, lines: lines.collect() });
    Ok(blocks)
}

/// Groups cells by the kind of their finding.
fn findings(outcomes: &[&Outcome]) -> Block {
    let mut kinds: Vec<(String, Vec<String>)> = Vec::new();
    for outcome in outcomes {
        let found = verdict::finding(outcome);
        match kinds.iter_mut().find(|(kind, _)| *kind == found.kind) {
            Some((_, figures)) => figures.push(found.figures),
            None => kinds.push((found.kind, vec![found.figures])),
        }
    }
    // Changes come first.
    kinds.sort_by_key(|(kind, _)| !kind.contains(verdict::CHANGED));
    Block::Groups(kinds)
}

/// The disk, the path to it, and the load.
fn place(cell: &Cell) -> [String; 3] {
    let through = match (cell.through, cell.target) {
        (Through::Daemon, Target::Null) => "daemon".to_owned(),
        (through, _) => format!("{through}, {}", cell.engine),
    };
    [cell.target.to_string(), through, cell.load_and_option()]
}

/// Formats `before → after`.
fn both(outcome: &Outcome, value: impl Fn(&Side) -> Option<f64>) -> String {
    both_by(outcome, value, number)
}

fn both_by(
    outcome: &Outcome,
    value: impl Fn(&Side) -> Option<f64>,
    show: fn(f64) -> String,
) -> String {
    let show = |side| value(side).map_or_else(|| "\u{2013}".to_owned(), show);
    match (show(&outcome.off), show(&outcome.on)) {
        (off, on) if off == on => off,
        (off, on) => format!("{off} \u{2192} {on}"),
    }
}

fn figures(outcomes: &[&Outcome]) -> Block {
    let head = [
        "disk",
        "through",
        "load",
        "IOPS",
        "ratio (range)",
        "mean latency \u{b5}s",
        "p99 \u{b5}s",
        "at once, median",
        "system calls/I/O",
        "CPU \u{b5}s/I/O",
    ];
    let median = |spread: Option<Spread>| spread.map(|spread| spread.median);
    let rows = outcomes.iter().map(|outcome| {
        let ratio = verdict::iops(outcome);
        let columns = [
            both(outcome, |side| Some(side.iops())),
            ratio.map_or_else(|| "\u{2013}".to_owned(), |change| change.ratio.show()),
            both(outcome, |side| median(side.mean_us())),
            both(outcome, |side| side.latency_us("all", P99)),
            both_by(outcome, |side| side.harvested(HARVESTED_P50), verdict::short_number),
            both(outcome, Side::system_calls_per_io),
            both(outcome, |side| median(side.spread(|sample| sample.cpu_us_per_io))),
        ];
        place(&outcome.cell).into_iter().chain(columns).collect()
    });
    Block::Table {
        caption: "Off \u{2192} on, medians of the rounds".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows: rows.collect(),
        words: 3,
    }
}

/// Completions at once before and after, in the format of the QEMU patch's message.
fn batch_table(outcomes: &[&Outcome]) -> Block {
    let percentiles = SIZE_PERCENTILES.map(|at| format!("{}th", at.replace('_', ".")));
    let head = ["disk", "through", "load", "switch"].map(str::to_owned).into_iter();
    let rows = outcomes.iter().flat_map(|outcome| {
        [("before", &outcome.off), ("after", &outcome.on)].map(|(name, side)| {
            let sizes = (0..SIZE_PERCENTILES.len()).map(|index| {
                side.harvested(index).map_or_else(|| "\u{2013}".to_owned(), |n| format!("{n:.0}"))
            });
            let place = place(&outcome.cell).map(|word| first_only(name, word));
            place.into_iter().chain([name.to_owned()]).chain(sizes).collect()
        })
    });
    Block::Table {
        caption: "Percentiles of the number of completions harvested at once".to_owned(),
        head: head.chain(percentiles).collect(),
        rows: rows.collect(),
        words: 4,
    }
}

/// A word in the row of `before`, nothing in the row below it.
fn first_only(side: &str, word: String) -> String {
    if side == "before" { word } else { String::new() }
}

/// fio's percentiles of latency for reads and writes, before and after.
fn percentile_table(outcomes: &[&Outcome]) -> Block {
    let mixed = outcomes.iter().filter(|outcome| outcome.cell.load == FILE_SERVER);
    let rows = mixed.flat_map(|outcome| {
        ["read", "write"].into_iter().flat_map(|direction| {
            [("before", &outcome.off), ("after", &outcome.on)].map(|(name, side)| {
                let cells = (0..LATENCY_PERCENTILES.len()).map(|index| {
                    let us = side.latency_us(direction, index);
                    us.map_or_else(|| "\u{2013}".to_owned(), number)
                });
                let [disk, through, _] = place(&outcome.cell);
                let words = [disk, through, direction.to_owned()];
                let words = words.map(|word| first_only(name, word));
                words.into_iter().chain([name.to_owned()]).chain(cells).collect()
            })
        })
    });
    let head = ["disk", "through", "", "switch"].map(str::to_owned).into_iter();
    let percentiles = LATENCY_PERCENTILES.map(|(_, percent)| format!("{percent}th"));
    Block::Table {
        caption: format!("Latency percentiles in \u{b5}s: {}", FILE_SERVER.name),
        rows: rows.collect(),
        head: head.chain(percentiles).collect(),
        words: 4,
    }
}

/// An overview, then details.
fn pictures(number: usize, outcomes: &[&Outcome]) -> Result<Vec<Block>> {
    let mut overview =
        vec![Plot { svg: iops_picture(outcomes)?, caption: "IOPS, off and on".to_owned() }];
    if [3, 4, 5].contains(&number) {
        let rows = outcomes.iter().filter_map(|outcome| {
            let (off, on) = (outcome.off.system_calls_per_io()?, outcome.on.system_calls_per_io()?);
            Some(Row { name: outcome.cell.short_name(), off, on })
        });
        let svg = plot::bars(&rows.collect::<Vec<_>>(), "system calls for each I/O")?;
        overview.push(Plot { svg, caption: "System calls for each I/O, off and on".to_owned() });
    }
    let mut details = Vec::new();
    for outcome in outcomes {
        match (number, outcome.cell.through, outcome.cell.load.depth) {
            (2, Through::Engine, _) => details.extend(harvest_pictures(outcome)?),
            (4 | 5, _, 1) => details.push(latency_picture(outcome)?),
            _ => {}
        }
    }
    Ok(vec![Block::Plots(overview), Block::Plots(details)])
}

fn iops_picture(outcomes: &[&Outcome]) -> Result<String> {
    let iops = |side: &Side| side.spread(|sample| Some(sample.iops));
    let rows = outcomes.iter().filter_map(|outcome| {
        let (off, on) = (iops(&outcome.off)?, iops(&outcome.on)?);
        Some(Row { name: outcome.cell.short_name(), off, on })
    });
    plot::spreads(&rows.collect::<Vec<_>>(), "IOPS, logarithmic")
}

/// The distribution of batches and of latencies.
fn harvest_pictures(outcome: &Outcome) -> Result<Vec<Plot>> {
    let sizes = |side: &Side| -> Vec<f64> {
        (0..SIZE_PERCENTILES.len()).filter_map(|index| side.harvested(index)).collect()
    };
    let most = f64::from(outcome.cell.load.depth);
    let [disk, through, _] = place(&outcome.cell);
    Ok(vec![
        Plot {
            svg: plot::batches(&sizes(&outcome.off), &sizes(&outcome.on), most)?,
            caption: format!("Completions harvested at once: {disk}, {through}, 128 in flight"),
        },
        latency_picture(outcome)?,
    ])
}

fn latency_picture(outcome: &Outcome) -> Result<Plot> {
    let at = |side: &Side| -> Vec<f64> {
        let places = 0..LATENCY_PERCENTILES.len();
        places.filter_map(|index| side.latency_us("all", index)).collect()
    };
    let [disk, through, load] = place(&outcome.cell);
    Ok(Plot {
        svg: plot::latencies(&at(&outcome.off), &at(&outcome.on))?,
        caption: format!("Latency: {disk}, {through}, {load}"),
    })
}

fn outcome_json(outcome: &Outcome) -> serde_json::Value {
    let Outcome { cell, off, on } = outcome;
    let found = verdict::finding(outcome);
    serde_json::json!({
        "name": cell.name(),
        "experiment": cell.experiment,
        "target": cell.target,
        "through": cell.through,
        "engine": cell.engine,
        "load": cell.load.name,
        "options_off": cell.off,
        "options_on": cell.on,
        "iops_ratio": verdict::iops(outcome).map(|change| change.ratio),
        "mean_latency_ratio": verdict::latency(outcome).map(|change| change.ratio),
        "finding": format!("{}: {}", found.kind, found.figures),
        "off": off,
        "on": on,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::verdict::tests::{outcome, side};

    fn experiments() -> Experiments {
        let mut result = Experiments::new(Machine { facts: vec![("CPU", "fast".to_owned())] });
        let note = TargetNote { target: Target::Zram, description: "memory".to_owned() };
        result.targets.push(note);
        let (off, on) = (side(&[(100.0, 180.0, 128.0); 7]), side(&[(100.0, 40.0, 16.0); 7]));
        for name in ["2/zram/engine-alone/aio", "2/zram/daemon/aio/file-server"] {
            result.outcomes.push(outcome(name, off.clone(), on.clone()));
        }
        result
    }

    #[test]
    fn the_markdown_has_figures_batches_and_percentiles() {
        let [_, (_, text), _] = experiments().files().unwrap();
        for part in [
            "| zram | engine alone, aio | randread 4k, 128 in flight, submits of 16 | 100 | 1.00 |",
            "| before | 128 | 128 | 128 |",
            "| after | 16 | 16 | 16 |",
            "Latency percentiles in \u{b5}s: file server pattern",
            "| zram | daemon, aio | read | before | 180 | 360 | 540 |",
            "|  |  |  | after | 40.0 | 80.0 | 120 |",
            "completions are found earlier, not made earlier",
            "\n  - zram, daemon aio, file server: 1.00 times, mean latency 0.22 times, median \
             at once 128 \u{2192} 16\n",
            "Roman Pen",
            "CPU: fast",
            "zram: memory",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert!(!text.contains("## 1."), "an experiment that was not made is left out");
    }

    #[test]
    fn the_page_has_pictures_and_the_json_every_round() {
        let [(_, html), _, (_, json)] = experiments().files().unwrap();
        assert!(html.matches("<svg ").count() >= 3, "{html}");
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["cells"][0]["on"]["samples"][6]["iops"], 100.0);
        assert_eq!(json["cells"][0]["iops_ratio"]["median"], 1.0);
        assert_eq!(json["machine"]["CPU"], "fast");
    }
}
