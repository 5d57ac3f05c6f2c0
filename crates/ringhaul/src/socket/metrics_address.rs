//! The address of `--metrics`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;

/// The address of a metrics server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An address and a port.
    Tcp(SocketAddr),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        text.parse().map(Self::Tcp).map_err(|_| {
            format!("'{text}' is not of the form ADDRESS:PORT or unix:PATH, such as 127.0.0.1:9750")
        })
    }
}

impl<'de> Deserialize<'de> for MetricsAddress {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_port_or_a_path() {
        assert_eq!("unix:/a".parse(), Ok(MetricsAddress::Unix("/a".into())));
        let tcp = "127.0.0.1:9750".parse().unwrap();
        assert_eq!("127.0.0.1:9750".parse(), Ok(MetricsAddress::Tcp(tcp)));
        for bad in ["", "unix:", "9750", "localhost:9750", "127.0.0.1", "/a"] {
            assert!(bad.parse::<MetricsAddress>().is_err(), "{bad}");
        }
    }
}
