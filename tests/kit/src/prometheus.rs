//! Prometheus, which scrapes one daemon.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_tools::process::retry;
use serde_json::Value;

use crate::cli::LIMIT;

/// A running Prometheus. Dropping it ends it.
pub struct Prometheus {
    address: SocketAddr,
    child: Child,
}

/// The values of a series.
#[derive(Debug)]
pub struct Series {
    /// An object with its labels.
    pub labels: Value,
    /// Times in seconds, and values.
    pub points: Vec<(f64, f64)>,
}

impl Prometheus {
    /// Starts Prometheus with its files in `folder`. It scrapes the daemon at `scraped` once in
    /// `interval`, such as `500ms`.
    ///
    /// # Errors
    /// If it is not installed, or its configuration cannot be written.
    pub fn start(folder: &Path, scraped: SocketAddr, interval: &str) -> Result<Self> {
        let config = format!(
            "global: {{ scrape_interval: {interval} }}\n\
             scrape_configs:\n\
             - job_name: ringhaul\n  \
               static_configs: [{{ targets: ['{scraped}'] }}]\n"
        );
        let file = folder.join("prometheus.yml");
        std::fs::write(&file, config).with_context(|| format!("writing {}", file.display()))?;
        let address = free_address()?;
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "prometheus"])
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("prometheus").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting prometheus; `make setup` installs it")?;
        Ok(Self { address, child })
    }

    /// The values of an expression now.
    ///
    /// # Errors
    /// If Prometheus does not listen yet, or refuses the expression.
    pub fn query(&self, expression: &str) -> Result<Vec<f64>> {
        let result = self.get("query", &[("query", expression)])?;
        result.iter().map(|series| value(&series["value"][1])).collect()
    }

    /// Waits until an expression has a value.
    ///
    /// # Errors
    /// If it has none in time.
    pub fn wait(&self, expression: &str) -> Result<()> {
        retry(LIMIT, || {
            let values = self.query(expression)?;
            ensure!(values.iter().any(|value| !value.is_nan()), "{expression} has no data");
            Ok(())
        })
    }

    /// The values of an expression between two times, in seconds since 1970.
    ///
    /// # Errors
    /// If Prometheus refuses the expression.
    pub fn query_range(
        &self,
        expression: &str,
        (start, end): (f64, f64),
        step: Duration,
    ) -> Result<Vec<Series>> {
        let (start, end, step) =
            (start.to_string(), end.to_string(), step.as_secs_f64().to_string());
        let parameters = [("query", expression), ("start", &start), ("end", &end), ("step", &step)];
        let result = self.get("query_range", &parameters)?;
        let point = |point: &Value| {
            Ok((point[0].as_f64().context("a point without a time")?, value(&point[1])?))
        };
        let series = result.into_iter().map(|series| {
            let points = series["values"].as_array().context("a series without values")?;
            let points = points.iter().map(point).collect::<Result<_>>()?;
            Ok(Series { labels: series["metric"].clone(), points })
        });
        series.collect()
    }

    /// The result of a query.
    fn get(&self, page: &str, parameters: &[(&str, &str)]) -> Result<Vec<Value>> {
        let encode =
            |text: &str| -> String { text.bytes().map(|byte| format!("%{byte:02x}")).collect() };
        let parameters: Vec<String> =
            parameters.iter().map(|(name, text)| format!("{name}={}", encode(text))).collect();
        let path = format!("/api/v1/{page}?{}", parameters.join("&"));
        let (head, body) = get(TcpStream::connect(self.address)?, &path)?;
        ensure!(head.contains(" 200 "), "{parameters:?}: {head} {body}");
        let answer: Value = serde_json::from_str(&body).context("reading the answer")?;
        Ok(answer["data"]["result"].as_array().context("no result")?.clone())
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn value(text: &Value) -> Result<f64> {
    let text = text.as_str().context("no value")?;
    text.parse().with_context(|| format!("{text} is no number"))
}

/// The head and the body of the answer to a request for this page.
///
/// # Errors
/// If the server does not answer in HTTP.
pub fn get(mut stream: impl Read + Write, page: &str) -> Result<(String, String)> {
    // Version 1.0: the end of the answer closes the connection.
    write!(stream, "GET {page} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer has no head")?;
    Ok((head.to_owned(), body.to_owned()))
}

/// An address that was free a moment ago.
///
/// # Errors
/// If no port is free.
pub fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("finding a free port")?;
    listener.local_addr().context("finding a free port")
}
