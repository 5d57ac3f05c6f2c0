//! Exports, each a disk on a socket, from the plain options or from `--export`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use disks::spec::redact_spec;
use ringhaul_options::LockChoice;
use ringhaul_options::key_value::{Parts, Size, split_at_commas};
use serde::Deserialize;

use super::unit::{one_disk, parse_all, parse_units};
use super::{DeviceKind, ExportArgs, ServeArgs};
use crate::spec::qos::{OnError, QosChange, QosSpec};
use crate::spec::{CacheMode, DeviceSpec, DiskSpec, EndpointSpec, ExportSettings, ExportSpec};

/// Options that hold for exports which do not set them.
pub(crate) const OF_EXPORTS: [&str; 14] = [
    "cache",
    "fixed-buffers",
    "in-order",
    "limits",
    "lock",
    "logical-block-size",
    "notify-batch",
    "num-queues",
    "prefetch",
    "queue-size",
    "read-only",
    "rerror",
    "run-max",
    "werror",
];

impl ServeArgs {
    /// The exports of the options: at least one, unless a configuration file may name exports.
    ///
    /// # Errors
    ///
    /// When there is none, or one makes no sense.
    pub fn exports(&self) -> Result<Vec<ExportSpec>> {
        if self.config.is_some() && !self.exports.names_any_export(self.fd) {
            return Ok(Vec::new());
        }
        let mut exports = self.exports.specs(self.fd)?;
        for export in &mut exports {
            export.settings.notify_batch = self.switches.notify_batch.is_on();
            export.settings.prefetch = self.switches.prefetch.is_on();
            export.settings.run_max = self.switches.run_max;
            export.check(self.iothreads)?;
        }
        Ok(exports)
    }

    /// Checks options that depend on each other.
    ///
    /// # Errors
    ///
    /// When one is given that another makes useless.
    pub(crate) fn check(&self) -> Result<()> {
        self.engine.check_io_uring_options(&self.io_uring_options()).map_err(anyhow::Error::msg)
    }

    /// The settings of exports that leave them out.
    pub(crate) fn default_settings(&self) -> ExportSettings {
        ExportSettings {
            notify_batch: self.switches.notify_batch.is_on(),
            prefetch: self.switches.prefetch.is_on(),
            run_max: self.switches.run_max,
            ..self.exports.default_settings()
        }
    }
}

impl ExportArgs {
    /// Returns true if the options name an export, or a part of one.
    fn names_any_export(&self, fd: Option<i32>) -> bool {
        self.names_plain_export(fd) || !self.export.is_empty()
    }

    /// Returns true if the plain options name an export, or a part of one.
    fn names_plain_export(&self, fd: Option<i32>) -> bool {
        let has_disk = self.blk_file.is_some() || self.disk.is_some() || !self.lun.is_empty();
        has_disk || self.socket_path.is_some() || fd.is_some()
    }

    /// The exports of the options, at least one. The first is on the inherited descriptor `fd`, if
    /// there is one.
    ///
    /// # Errors
    ///
    /// When there is none, or one makes no sense.
    pub fn specs(&self, fd: Option<i32>) -> Result<Vec<ExportSpec>> {
        let mut exports = Vec::new();
        if self.names_plain_export(fd) || self.export.is_empty() {
            exports.push(self.main_export(fd)?);
        }
        for text in &self.export {
            let export = self
                .parse_export(text)
                .with_context(|| format!("cannot understand --export {}", redact_spec(text)))?;
            exports.push(export);
        }
        Ok(exports)
    }

    fn main_device(&self) -> Result<DeviceSpec> {
        if self.device == DeviceKind::Scsi {
            if self.serial.is_some() {
                bail!("a serial number belongs to a unit; use --lun 0,serial=TEXT,disk=DISK");
            }
            if self.blk_file.is_some() {
                bail!("a virtio-scsi device has units; use --lun 0,blk-file=PATH");
            }
            if self.disk.is_some() {
                bail!("a virtio-scsi device has units; use --lun 0,disk=DISK");
            }
            return Ok(DeviceSpec::Scsi(parse_all(&self.lun)?));
        }
        if !self.lun.is_empty() {
            bail!("a virtio-blk device has no units; use --device scsi with --lun");
        }
        let disk = match (&self.blk_file, &self.disk) {
            (Some(path), _) => DiskSpec::File(path.clone()),
            (None, Some(text)) => DiskSpec::parse(text)
                .with_context(|| format!("cannot understand --disk {}", redact_spec(text)))?,
            (None, None) => bail!("no disk is given; use --blk-file PATH or --disk null,size=SIZE"),
        };
        Ok(DeviceSpec::Blk(disk))
    }

    fn main_export(&self, fd: Option<i32>) -> Result<ExportSpec> {
        let device = self.main_device()?;
        let endpoint = match (&self.socket_path, fd) {
            (Some(path), _) => EndpointSpec::Path(path.clone()),
            (None, Some(fd)) => EndpointSpec::Fd(fd),
            (None, None) => bail!("no socket is given; use --socket-path PATH or --fd FD"),
        };
        Ok(ExportSpec { name: self.name.clone(), endpoint, device, settings: self.settings() })
    }

    /// The options that hold for all exports.
    fn settings(&self) -> ExportSettings {
        ExportSettings {
            read_only: self.read_only,
            no_lock: self.lock == LockChoice::Off,
            late_lock: self.lock == LockChoice::Late,
            in_order: self.in_order.is_on(),
            cache: self.cache,
            serial: self.serial.clone(),
            logical_block_bytes: self.logical_block_size,
            num_queues: self.num_queues,
            queue_size: self.queue_size,
            iothread: self.iothread,
            fixed_buffers: self.fixed_buffers,
            rules: QosSpec::default().with_change(&QosChange {
                limits: self.limits.clone(),
                rerror: self.rerror.map(OnError::from),
                werror: self.werror,
            }),
            ..ExportSettings::default()
        }
    }

    /// The settings for all exports except the one of the plain options. A serial number for all
    /// would be the number of several disks, and one IoThread for all is `--iothreads 1`.
    fn default_settings(&self) -> ExportSettings {
        ExportSettings { serial: None, iothread: None, ..self.settings() }
    }

    fn parse_export(&self, text: &str) -> Result<ExportSpec> {
        let parts = split_at_commas(text);
        let mut parts = Parts::new(&parts);
        let keys: ExportKeys = parts.take(&[])?;
        let rules = QosChange::from_parts(parts)?;
        let disk = one_disk(keys.disk, keys.blk_file, keys.null)?;
        let path = keys.socket_path.context("it has no socket; add socket-path=PATH")?;
        let is_scsi = keys.device == Some(DeviceKind::Scsi);
        if is_scsi && keys.serial.is_some() {
            bail!("a serial number belongs to a unit; put serial= after its lun=");
        }
        let device = match (is_scsi, keys.lun, disk) {
            (true, units, None) => DeviceSpec::Scsi(parse_units(&units.unwrap_or_default())?),
            (true, _, Some(_)) => {
                bail!("a virtio-scsi device has units; put lun=0 before the disk")
            }
            (false, Some(_), _) => bail!("a virtio-blk device has no units; add device=scsi"),
            (false, None, disk) => DeviceSpec::Blk(
                disk.context("it has no disk; add disk=DISK, blk-file=PATH or null=SIZE")?,
            ),
        };
        let usual = self.default_settings();
        let settings = ExportSettings {
            read_only: keys.read_only.unwrap_or(usual.read_only),
            no_lock: keys.lock.map_or(usual.no_lock, |lock| lock == LockChoice::Off),
            late_lock: keys.lock.map_or(usual.late_lock, |lock| lock == LockChoice::Late),
            in_order: keys.in_order.unwrap_or(usual.in_order),
            cache: keys.cache.or(usual.cache),
            serial: keys.serial,
            logical_block_bytes: keys.logical_block_size.or(usual.logical_block_bytes),
            num_queues: keys.num_queues.or(usual.num_queues),
            queue_size: keys.queue_size.unwrap_or(usual.queue_size),
            iothread: keys.iothread,
            rules: usual.rules.with_change(&rules),
            ..usual
        };
        let endpoint = EndpointSpec::Path(path);
        let export = ExportSpec { name: keys.name, endpoint, device, settings };
        // The daemon knows the number of its IoThreads.
        export.check(u16::MAX)?;
        Ok(export)
    }
}

/// The keys of `--export`, without rules.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ExportKeys {
    socket_path: Option<PathBuf>,
    name: Option<String>,
    device: Option<DeviceKind>,
    lun: Option<Vec<String>>,
    disk: Option<Vec<String>>,
    blk_file: Option<PathBuf>,
    null: Option<Size>,
    read_only: Option<bool>,
    lock: Option<LockChoice>,
    in_order: Option<bool>,
    cache: Option<CacheMode>,
    serial: Option<String>,
    logical_block_size: Option<u32>,
    num_queues: Option<u16>,
    queue_size: Option<u16>,
    iothread: Option<u16>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn exports(arguments: &[&str]) -> Result<Vec<ExportSpec>> {
        let arguments = [&["serve"], arguments].concat();
        Program::try_parse_from(arguments)?.args.exports()
    }

    /// An option that named a disk in vain would be noticed in the guest only.
    #[test]
    fn plain_options_name_an_export_beside_others() {
        let export = ["--export", "socket-path=/b,null=1G"];
        for (plain, reason) in [
            (&["--lun", "0,null=1M", "--device", "scsi"][..], "no socket is given"),
            (&["--disk", "null:1M"], "no socket is given"),
            (&["--blk-file", "/disk"], "no socket is given"),
            (&["--socket-path", "/a"], "disk"),
        ] {
            let refused = exports(&[plain, &export].concat()).unwrap_err().to_string();
            assert!(refused.contains(reason), "{plain:?}: {refused}");
        }
        assert_eq!(exports(&export).unwrap().len(), 1);
        let two = ["--socket-path", "/a", "--disk", "null:1M"];
        assert_eq!(exports(&[&two[..], &export].concat()).unwrap().len(), 2);
    }

    #[test]
    fn an_export_has_its_own_options_and_the_common_ones() {
        let all = exports(&[
            "--num-queues",
            "2",
            "--cache",
            "directsync",
            "--export",
            "socket-path=/a,,b.sock,blk-file=/srv/x=y.img,read-only=on",
            "--export",
            "socket-path=/c.sock,null=1G,cache=writeback,num-queues=7,serial=s,name=vm1",
            "--export",
            "socket-path=/d.sock,cache=writeback,disk=raw,offset=1M,over=file,path=/a,,b",
        ])
        .unwrap();
        assert_eq!((&*all[0].name(), &*all[1].name()), ("/a,b.sock", "vm1"));
        assert_eq!(all.len(), 3);
        let part = DiskSpec::parse("raw,offset=1M,over=/a,,b").unwrap();
        assert_eq!(all[2].device, DeviceSpec::Blk(part));
        assert_eq!(all[0].endpoint, EndpointSpec::Path("/a,b.sock".into()));
        let file = DiskSpec::File("/srv/x=y.img".into());
        assert_eq!(all[0].device, DeviceSpec::Blk(file));
        assert!(all[0].settings.read_only && all[0].settings.cache == Some(CacheMode::Directsync));
        assert_eq!([0, 1].map(|at| all[at].settings.num_queues), [Some(2), Some(7)]);
        let null = DiskSpec::Null { size_bytes: 1 << 30 };
        assert_eq!(all[1].device, DeviceSpec::Blk(null));
        assert!(!all[1].settings.read_only && all[1].settings.cache == Some(CacheMode::Writeback));
        assert_eq!(all[1].settings.serial.as_deref(), Some("s"));
    }

    #[test]
    fn a_virtio_scsi_device_has_units() {
        let main = ["--socket-path", "/a", "--device", "scsi"];
        let units = ["--lun", "0,null=1M", "--lun", "2:7,null=1M,read-only=on"];
        let more =
            ["--export", "socket-path=/b,device=scsi,num-queues=2,lun=3,null=1M,discard=off"];
        let all = exports(&[&main[..], &units[..], &more[..]].concat()).unwrap();
        let addresses = |export: &ExportSpec| match &export.device {
            DeviceSpec::Scsi(units) => units.iter().map(|unit| (unit.target, unit.lun)).collect(),
            DeviceSpec::Blk(_) => Vec::new(),
        };
        assert_eq!(addresses(&all[0]), [(0, 0), (2, 7)]);
        assert_eq!(addresses(&all[1]), [(0, 3)]);
        assert_eq!(all[1].settings.num_queues, Some(2));
        // The device may get its units later.
        assert!(addresses(&exports(&main).unwrap()[0]).is_empty());
        for bad in [
            &["--socket-path", "/a", "--lun", "0,null=1M"][..],
            &["--socket-path", "/a", "--device", "scsi", "--blk-file", "/x"],
            &["--export", "socket-path=/a,lun=0,null=1M"],
            &["--export", "socket-path=/a,device=scsi,null=1M"],
            &["--export", "socket-path=/a,device=scsi,disk=null:1M"],
            &["--export", "socket-path=/a,device=nvme,null=1M"],
        ] {
            assert!(exports(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn an_export_may_have_an_io_thread_to_itself() {
        let plain = ["--iothreads", "3", "--iothread", "1", "--socket-path", "/a", "--disk"];
        let plain = [&plain[..], &["null,size=1M"]].concat();
        let with = |more: &str| {
            let more = format!("socket-path=/b,null=1M{more}");
            exports(&[&plain[..], &["--export", &more]].concat())
        };
        let threads = |more: &str| {
            let all = with(more).unwrap();
            all.iter().map(|export| export.settings.iothread).collect::<Vec<_>>()
        };
        assert_eq!(threads(""), [Some(1), None]);
        assert_eq!(threads(",iothread=2"), [Some(1), Some(2)]);
        let error = with(",iothread=3").unwrap_err().to_string();
        assert_eq!(error, "IoThread 3 does not exist; with --iothreads 3 the IoThreads are 0 to 2");
        assert!(with(",iothread=x").is_err());
    }

    #[test]
    fn the_plain_options_are_an_export_too() {
        let plain = ["--socket-path", "/a.sock", "--blk-file", "/x.img"];
        let more = ["--export", "socket-path=/b.sock,null=1M"];
        assert_eq!(exports(&plain).unwrap().len(), 1);
        assert_eq!(exports(&[&plain[..], &more[..]].concat()).unwrap().len(), 2);
        assert!(exports(&[]).unwrap_err().to_string().contains("no disk is given"));
        assert!(exports(&plain[..2]).is_err() && exports(&plain[2..]).is_err());
    }

    #[test]
    fn an_export_that_makes_no_sense_is_refused() {
        for bad in [
            "",
            "socket-path=/a",
            "blk-file=/x",
            "socket-path=,blk-file=/x",
            "socket-path=/a,blk-file=/x,size=3",
            "socket-path=/a,blk-file=/x,read-only=yes",
            "socket-path=/a,blk-file=/x,cache=fast",
            "socket-path=/a,blk-file=/x,num-queues=0",
            "socket-path=/a,blk-file=/x,num-queues=257",
            "socket-path=/a,blk-file=/x,queue-size=3",
            "socket-path=/a,blk-file=/x,logical-block-size=big",
            "socket-path=/a,null=1X",
            "socket-path=/a,socket-path=/b,null=1M",
            "socket-path=/a,null=1M,null=1M",
            "socket-path=/a,null=1M,blk-file=/x",
            "socket-path=/a,null=1M,disk=null:1M",
            "disk=null:1M,socket-path=/a",
            "socket-path=/a,disk=",
            "socket-path=/a,null=1M,serial=a,serial=b",
            "socket-path=/a,null=1M,name=",
            "socket-path=/a,null=1M,name=a\tb",
            "socket-path=/a,null=1M,name=a,name=b",
        ] {
            assert!(exports(&["--export", bad]).is_err(), "{bad} was taken");
        }
    }
}
