//! The rules and the dashboard in `contrib/monitoring`, with Prometheus itself.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, bench, run, serve};
use ringhaul_kit::prometheus::{Prometheus, free_address};
use ringhaul_tools::process::output;
use rustix::process::Signal;
use serde_json::Value;

use crate::{DISK_BYTES, test_folders};

const MONITORING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib/monitoring");

#[test]
fn the_alert_rules_fire_on_their_conditions_only() -> Result<()> {
    for arguments in [["check", "rules", "alerts.yml"], ["test", "rules", "alerts-test.yml"]] {
        let mut promtool = Command::new("promtool");
        output(promtool.args(arguments).current_dir(MONITORING))?;
    }
    Ok(())
}

/// Each alert has a test that sees it fire.
#[test]
fn each_alert_rule_has_a_test() -> Result<()> {
    let read = |file: &str| std::fs::read_to_string(Path::new(MONITORING).join(file));
    let (rules, tests) = (read("alerts.yml")?, read("alerts-test.yml")?);
    let names: Vec<&str> =
        rules.lines().filter_map(|line| line.split_once("alert: ")).map(|(_, name)| name).collect();
    ensure!(names.len() > 5, "{names:?}");
    for name in names {
        let tests: Vec<&str> = tests
            .split("- eval_time:")
            .filter(|test| test.contains(&format!("alertname: {name}\n")))
            .collect();
        ensure!(tests.iter().any(|test| test.contains("exp_labels")), "{name} has no test");
    }
    Ok(())
}

/// The expressions of the dashboard, with its variables replaced.
fn expressions() -> Result<Vec<String>> {
    let dashboard = std::fs::read_to_string(Path::new(MONITORING).join("dashboard.json"))?;
    let dashboard: Value = serde_json::from_str(&dashboard)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let expressions = targets.filter_map(|target| target["expr"].as_str());
    let replaced = expressions
        .map(|expression| expression.replace("$export", ".*").replace("$__rate_interval", "30s"));
    Ok(replaced.collect())
}

#[test]
fn prometheus_answers_each_expression_of_the_dashboard_with_data() -> Result<()> {
    let folders = test_folders()?;
    let scraped = free_address()?;
    folders.disk("disk.img", DISK_BYTES)?;
    let mut command = serve(&folders.socket("vm.sock"), &folders.path("disk.img"))?;
    let mut daemon = Running::serve(command.args(["--metrics", &scraped.to_string()]))?;
    let prometheus = Prometheus::start(&folders.path(""), scraped, "500ms")?;
    run(&mut bench(&folders.socket("vm.sock"), "--rw randrw --iodepth 8 --runtime 10")?)?
        .expect_code(0)?;
    let expressions = expressions()?;
    ensure!(expressions.len() > 15, "{expressions:?}");
    for expression in &expressions {
        prometheus.wait(expression)?;
    }
    let rate = prometheus.query("sum(rate(ringhaul_request_duration_seconds_count[30s]))")?;
    ensure!(rate.first() > Some(&1.0), "no load: {rate:?}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
