//! The specification of an NBD export, and its URI.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::nbd::{NbdAddress, NbdOptions, NbdTls};

/// The port that is registered for NBD.
const PORT: u16 = 10809;

/// An export of an NBD server. It has either `socket` or `host`.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[serde(expecting = "the keys of this kind of disk and their values")]
pub struct NbdSpec {
    /// The socket of a server on this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// The machine of the server, by its name or address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The port of the server. `None`: 10809.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The name of the export. A server may have one with an empty name.
    #[serde(default)]
    pub export: String,
    /// Connections of each IoThread, where the server allows more than one. `None`: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// The seconds without an answer after which a request fails. `None`: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_seconds: Option<u32>,
    /// The treatment of data that was written, but not flushed, when a connection breaks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unflushed: Option<Unflushed>,
    /// True if connections are encrypted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls: bool,
    /// A folder with `ca-cert.pem`, and with `client-cert.pem` and `client-key.pem` where the
    /// server demands them. `None`: the authorities that the machine trusts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_certificates: Option<PathBuf>,
    /// The name in the certificate of the server. `None`: `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_hostname: Option<String>,
}

/// The assumption about data that a server has taken, but not brought to stable storage, before a
/// connection to it broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Unflushed {
    /// The server still has the data.
    Kept,
    /// The data may be gone: flushes fail from then on.
    Lost,
}

impl NbdSpec {
    /// Refuses a specification with no server or two, or with values that do not fit.
    ///
    /// # Errors
    ///
    /// With the part that is missing, wrong or too much.
    pub(super) fn check(&self) -> Result<()> {
        match (&self.socket, &self.host) {
            (None, None) => bail!(
                "an NBD disk needs a server: host and port, as in nbd://storage:10809/disk1, or \
                 socket, as in nbd+unix:///disk1?socket=/run/nbd.sock"
            ),
            (Some(_), Some(_)) => bail!("an NBD disk has a socket or a host, not both"),
            (Some(_), None) if self.port.is_some() => bail!("port goes with host, not with socket"),
            _ => {}
        }
        // Errors and the log repeat the name, which must not contain a password.
        if self.host.as_ref().is_some_and(|host| host.contains('@')) {
            bail!("the host of an NBD disk contains an @; NBD has no user and no password");
        }
        // A control character would break lines of the log, and a zero byte cannot be part of a
        // name.
        let texts = [Some(&self.export), self.host.as_ref(), self.tls_hostname.as_ref()];
        let mut paths = self.socket.iter().chain(&self.tls_certificates);
        let has_control = texts.into_iter().flatten().any(|text| text.contains(char::is_control))
            || paths.any(|path| path.to_string_lossy().contains(char::is_control));
        ensure!(!has_control, "a name of an NBD disk contains a control character");
        if !self.tls && (self.tls_certificates.is_some() || self.tls_hostname.is_some()) {
            bail!("tls-certificates and tls-hostname need TLS: use nbds:// or tls=on");
        }
        ensure!(
            !self.tls || self.socket.is_none() || self.tls_hostname.is_some(),
            "TLS over a Unix socket needs the name in the server's certificate; set \
             tls-hostname=NAME"
        );
        let connections = self.connections.unwrap_or(1);
        ensure!((1..=16).contains(&connections), "connections must be from 1 to 16");
        ensure!(self.deadline_seconds != Some(0), "deadline must be at least one second");
        Ok(())
    }

    /// The port of its server.
    pub(super) fn port(&self) -> u16 {
        self.port.unwrap_or(PORT)
    }

    /// All its paths.
    pub(super) fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        self.socket.iter_mut().chain(&mut self.tls_certificates)
    }

    /// The options of the NBD client.
    pub(crate) fn options(&self) -> NbdOptions {
        let address = match &self.socket {
            Some(path) => NbdAddress::Unix(path.clone()),
            None => {
                NbdAddress::Tcp { host: self.host.clone().unwrap_or_default(), port: self.port() }
            }
        };
        NbdOptions {
            address,
            export: self.export.clone(),
            connections: self.connections.unwrap_or(1),
            deadline: self.deadline_seconds.map(|seconds| Duration::from_secs(seconds.into())),
            distrust: self.unflushed == Some(Unflushed::Lost),
            tls: self.tls.then(|| NbdTls {
                certificates: self.tls_certificates.clone(),
                hostname: self.tls_hostname.clone(),
            }),
        }
    }
}

impl fmt::Display for NbdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.options().fmt(f)
    }
}

/// The keys and values that a URI stands for.
///
/// # Errors
///
/// When it is no URI of NBD.
pub(super) fn parts_of_uri(uri: &str) -> Result<Vec<String>> {
    let (scheme, rest) = uri.split_once("://").with_context(|| no_uri(uri))?;
    ensure!(!rest.contains('#'), "an NBD URI has no fragment; write a # in a name as %23");
    let scheme = scheme.to_ascii_lowercase();
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
    let mut parts = Vec::new();
    let is_unix = scheme.ends_with("+unix");
    let is_tls = scheme.starts_with("nbds");
    if is_tls {
        parts.push("tls=on".to_owned());
    }
    if is_unix {
        ensure!(
            authority.is_empty(),
            "a URI with +unix has no host, as in nbd+unix:///disk1?socket=.."
        );
    } else {
        let (host, port) = host_and_port(authority)?;
        parts.push(format!("host={host}"));
        parts.extend(port.map(|port| format!("port={port}")));
    }
    if !export.is_empty() {
        parts.push(format!("export={}", decoded(export)?));
    }
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        match key {
            "socket" if is_unix => {}
            "tls-certificates" | "tls-hostname" if is_tls => {}
            _ => bail!(
                "unknown parameter '{key}' of an NBD URI (expected: socket, with +unix; \
                 tls-certificates and tls-hostname, with nbds)"
            ),
        }
        parts.push(format!("{key}={}", decoded(value)?));
    }
    Ok(parts)
}

/// Advice for a text that is no URI, such as QEMU's own forms.
fn no_uri(text: &str) -> &'static str {
    match text.split_once(':') {
        Some((_, rest)) if rest.starts_with("unix:") => {
            "it is not a URI; instead of nbd:unix:PATH, write \
             nbd+unix:///disk1?socket=/run/nbd.sock"
        }
        _ => "it is not a URI; instead of nbd:HOST:PORT, write nbd://storage:10809/disk1",
    }
}

/// A host, which may be an IPv6 address in brackets, and a port.
fn host_and_port(authority: &str) -> Result<(String, Option<String>)> {
    ensure!(!authority.contains('@'), "an NBD URI has no user and no password");
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            match rest
                .split_once(']')
                .context("the address has no closing bracket, as in [::1]:10809")?
            {
                (host, "") => (host, None),
                (host, rest) => {
                    let port = rest.strip_prefix(':');
                    (host, Some(port.context("a colon must precede the port, as in [::1]:10809")?))
                }
            }
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let host = if host.is_empty() { "localhost" } else { host };
    Ok((decoded(host)?, port.filter(|port| !port.is_empty()).map(str::to_owned)))
}

/// A part of a URI without its percent signs.
fn decoded(text: &str) -> Result<String> {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next(), rest.next()].map(|digit| digit.map_or('x', char::from));
        let value = digits.map(|digit| digit.to_digit(16));
        let [Some(high), Some(low)] = value else {
            bail!("it has a percent sign without two hexadecimal digits")
        };
        bytes.push(u8::try_from(high * 16 + low)?);
    }
    String::from_utf8(bytes).map_err(|_| anyhow!("its percent-encoded bytes are not UTF-8"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::spec::DiskSpec;

    fn parse(text: &str) -> Result<String, String> {
        match DiskSpec::parse(text) {
            Ok(DiskSpec::Nbd(nbd)) => Ok(nbd.to_string()),
            Ok(other) => Err(format!("{other:?}")),
            Err(error) => Err(format!("{error:#}")),
        }
    }

    #[test]
    fn exports_are_named_by_uris_and_by_keys() {
        for (text, uri) in [
            ("nbd://storage", "nbd://storage:10809/"),
            ("nbd://storage/", "nbd://storage:10809/"),
            ("nbd://storage:99/a%2cb/c", "nbd://storage:99/a,b/c"),
            ("nbd://[::1]:99/x", "nbd://[::1]:99/x"),
            ("nbd://[::1]/x", "nbd://[::1]:10809/x"),
            ("nbd:///x", "nbd://localhost:10809/x"),
            ("NBDS://Storage/x%23y", "nbds://Storage:10809/x#y"),
            ("nbd://h/x,connections=4,deadline=30,unflushed=lost", "nbd://h:10809/x"),
            ("nbd+unix:///x?socket=/run/a.sock", "nbd+unix:///x?socket=/run/a.sock"),
            ("nbd+unix://?socket=/a", "nbd+unix:///?socket=/a"),
            ("nbd,host=h,port=7,export=x", "nbd://h:7/x"),
            ("nbd,socket=/a", "nbd+unix:///?socket=/a"),
            ("nbds://h/x?tls-certificates=/pki", "nbds://h:10809/x"),
            ("nbds+unix:///x?socket=/a&tls-hostname=h", "nbds+unix:///x?socket=/a"),
            ("nbd,host=h,tls=on,tls-certificates=/pki", "nbds://h:10809/"),
        ] {
            assert_eq!(parse(text).as_deref(), Ok(uri), "{text}");
        }
        let spec = DiskSpec::parse("nbd://h/x,connections=4,deadline=30,unflushed=lost").unwrap();
        let json = serde_json::to_string(&spec).unwrap();
        let expected = concat!(
            r#"{"nbd":{"host":"h","export":"x","connections":4,"#,
            r#""deadline-seconds":30,"unflushed":"lost"}}"#
        );
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_str::<DiskSpec>(&json).unwrap(), spec);
    }

    #[test]
    fn the_keys_of_a_name_become_the_options_of_the_client() {
        let options = |key: &str| match DiskSpec::parse(&format!("nbd://h/x{key}")).unwrap() {
            DiskSpec::Nbd(nbd) => nbd.options(),
            other => panic!("{other:?}"),
        };
        for (key, expected) in [("", false), (",unflushed=kept", false), (",unflushed=lost", true)]
        {
            assert_eq!(options(key).distrust, expected, "{key}");
        }
        for (key, expected) in [("", 1), (",connections=1", 1), (",connections=16", 16)] {
            assert_eq!(options(key).connections, expected, "{key}");
        }
        for (key, expected) in [("", None), (",deadline=1", Some(1)), (",deadline=90", Some(90))] {
            assert_eq!(options(key).deadline, expected.map(Duration::from_secs), "{key}");
        }
    }

    #[test]
    fn a_name_without_an_export_is_refused() {
        for (bad, expected) in [
            ("nbd", "needs a server"),
            ("nbd:storage", "not a URI; instead of nbd:HOST:PORT, write nbd://"),
            ("nbd:storage:10809:exportname=x", "instead of nbd:HOST:PORT"),
            ("nbd:unix:/run/nbd.sock", "write nbd+unix:///disk1?socket=/run/nbd.sock"),
            ("nbd://[::1/x", "the address has no closing bracket, as in [::1]:10809"),
            ("nbds+unix:///x?socket=/a", "set tls-hostname=NAME"),
            ("nbd,socket=/a,tls=on,tls-certificates=/pki", "set tls-hostname=NAME"),
            ("nbd+unix:///x", "needs a server"),
            ("nbd+unix://h/x?socket=/a", "has no host"),
            ("nbd://h/x?socket=/a", "unknown parameter 'socket'"),
            ("nbd://u@h/x", "has no user"),
            ("nbd,host=u:p@h", "contains an @"),
            ("nbd://h:70000/x", "port"),
            ("nbd://h/x%2", "percent sign"),
            ("nbd://h/x%ff", "are not UTF-8"),
            ("nbd://[::1]10809/x", "a colon must precede the port"),
            ("nbd://h/x#y", "has no fragment"),
            ("nbd://h/x%00", "control character"),
            ("nbd://h/x%0ay", "control character"),
            ("nbd+unix:///x?socket=/a%00", "control character"),
            ("nbd://h,socket=/a", "not both"),
            ("nbd,socket=/a,port=1", "port goes with host"),
            ("nbd://h,connections=0", "from 1 to 16"),
            ("nbd://h,deadline=0", "at least one second"),
            ("nbd://h,unflushed=maybe", "expected: kept, lost"),
            ("nbd://h/x?tls-hostname=h", "unknown parameter 'tls-hostname'"),
            ("nbd://h,tls-certificates=/pki", "need TLS"),
            ("nbd://h,tls-hostname=h", "need TLS"),
            ("nbd://h,connections=17", "from 1 to 16"),
            ("nbd://h,tls=maybe", "expected: on, off"),
        ] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains(expected), "{bad}: {error}");
        }
        let json = r#"{"nbd":{"export":"x"}}"#;
        let error = serde_json::from_str::<DiskSpec>(json).unwrap_err().to_string();
        assert!(error.contains("needs a server"), "{error}");
    }
}
