//! Each finding from a daemon that is healthy but for one fact.

mod host;

use std::time::Duration;

use ringhaul::spec::CacheMode;
use ringhaul::spec::command::{DiskState, ExportState};
use ringhaul::spec::status::{QueueRole, QueueState};
use serde_json::{Value, json};

use super::facts::{ExportFacts, Facts, ThreadFacts};
use super::finding::Level::{self, Harmful, Note, Warning};
use super::system::{BlockDevice, VcpuThread};
use super::*;

fn counts() -> Value {
    json!({ "requests": 0, "bytes": 0, "errors": 0 })
}

fn served() -> Value {
    json!({
        "reads": counts(), "writes": counts(), "flushes": counts(), "discards": counts(),
        "write-zeroes": counts(), "others": counts(),
    })
}

fn details() -> Value {
    let queue = |index: u16, role: QueueRole, state: QueueState| {
        json!({ "index": index, "role": role, "size": 128, "state": state, "next-avail": 0,
                "requests": 0 })
    };
    json!({
        "name": "vm1", "endpoint": { "path": "/run/vm1.sock" },
        "device": { "blk": { "file": "/vm1.img" } },
        "state": "serving", "size-bytes": 1 << 20, "disk-state": "ready", "connected": true,
        "sessions": 1, "unfinished": 0, "served": served(),
        "front-end": {
            "connected-seconds": 9, "peer": { "pid": 4711, "uid": 0, "gid": 0 },
            "features": ["flush", "event-idx"], "protocol-features": ["config", "inflight-shmfd"],
            "queues": [
                queue(0, QueueRole::Request, QueueState::Running),
                queue(1, QueueRole::Request, QueueState::Stopped),
            ],
            "memory": { "regions": 2, "bytes": 4_u64 << 30 },
        },
        "disks": [{
            "size-bytes": 1 << 20, "logical-block-bytes": 512, "direct": true, "read-only": false,
            "state": "ready", "waited": 0, "limits": {}, "rerror": "report", "werror": "report",
            "chain": ["file /vm1.img"], "device-number": "8:0",
            "engine": "io_uring", "engine-reason": "a trial of 256 reads",
        }],
    })
}

fn export_stats() -> Value {
    let errors = json!({ "disk": 0, "no-space": 0, "invalid": 9, "reserved": 0, "aborted": 0,
                         "unavailable": 0 });
    json!({
        "name": "vm1", "served": served(), "depth": 0, "depth-peak": 95, "throttled-ns": 0,
        "retried-ns": 0, "held-ns": 0, "queues": [],
        "operations": [{
            "operation": "read", "requests": 0, "bytes": 0, "errors": errors,
            "latency-buckets": [], "latency-sum-ns": 0, "latency-max-ns": 0,
        }],
    })
}

fn thread_stats() -> Value {
    let spread = || json!({ "median": 0, "p99": 0, "p999": 0, "max": 0 });
    let operations = || json!({ "count": 0, "errors": 0, "bytes": 0, "latency-ns": spread() });
    let memory = || json!({ "bytes": 0, "bytes-most": 0, "waits": 0, "failed": 0 });
    json!({
        "name": "iothread-0", "turns": 0, "rounds": 0, "reads": operations(),
        "writes": operations(), "flushes": operations(), "deallocations": operations(), "late": 0,
        "cpu-ns": 0, "run-delay-ns": 0, "poll-useful-ns": 0, "poll-useless-ns": 0, "polled": 0,
        "submits-refused": 0, "submits": 0, "submitted": 0, "harvests": 0,
        "harvested": 0, "harvested-at-once": spread(), "foreign": 0,
        "foreign-at-once": spread(), "woken": 0, "submitted-at-once": spread(), "bounced": 0,
        "bounce-memory": memory(), "list-memory": memory(),
        "system-calls": { "io_submit": 0, "io_getevents": 0, "io_uring_enter": 0, "epoll_wait": 0,
                          "eventfd_write": 0 },
    })
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A daemon that was looked at for two seconds, and that is healthy.
fn healthy() -> Facts {
    let word = "socket,id=a,path=/run/vm1.sock,reconnect-ms=1000";
    let export = ExportFacts {
        details: read(details()),
        stats: Some([read(export_stats()), read(export_stats())]),
        command_line: vec!["/usr/bin/qemu".into(), "-chardev".into(), word.into()],
        vcpus: vec![VcpuThread { cpus: "0-3".into() }, VcpuThread { cpus: "2".into() }],
        peer: Some(4711),
        devices: vec![Some([BlockDevice::default(); 2])],
    };
    let thread =
        ThreadFacts { stats: [read(thread_stats()), read(thread_stats())], cpus: "0-1".into() };
    Facts {
        process: read(json!({
            "process": 7, "options": [], "kernel": "6.1", "open-files": 79, "open-files-max": 100,
            "locked-memory-max-bytes": 128 << 10, "aio-operations": 79, "aio-operations-max": 100,
            "mapped-memory-bytes": 1 << 20, "cgroup-memory-max-bytes": 1 << 20,
            "dropped-log-lines": 0, "thread-cpus": [], "sandbox": "on", "sandbox-lacks": [],
        })),
        settings: read(json!({ "log": "info", "poll-max-us": 64, "poll-budget": 100 })),
        exports: vec![export],
        threads: vec![thread],
        online_cpus: (0..4).collect(),
        time: Duration::from_secs(2),
        first_stats: read(json!({
            "start-time-seconds": 0, "failed-takeovers": 0, "exports": [], "iothreads": [],
        })),
    }
}

#[test]
fn nothing_is_found_in_a_healthy_daemon() {
    assert_eq!(examine(&healthy()), []);
}

/// A change of the healthy daemon, and the finding: level, name, and words of the figure.
type Case = (fn(&mut Facts), Level, &'static str, &'static [&'static str]);

fn check(cases: &[Case], export: Option<&str>) {
    for (change, level, name, words) in cases {
        let mut facts = healthy();
        change(&mut facts);
        let found = examine(&facts);
        let [finding] = &found[..] else { panic!("{name}: {found:#?}") };
        assert_eq!((finding.level, finding.finding), (*level, *name), "{finding:?}");
        assert_eq!(finding.export.as_deref(), export);
        for word in *words {
            assert!(finding.figure.contains(word), "{name}: no {word:?}: {finding:?}");
        }
        assert!(!finding.remedy.is_empty());
    }
}

fn front_end(facts: &mut Facts) -> &mut ringhaul::spec::status::FrontEndDetails {
    facts.exports[0].details.front_end.as_mut().unwrap()
}

fn disk(facts: &mut Facts) -> &mut ringhaul::spec::status::DiskDetails {
    &mut facts.exports[0].details.disks[0]
}

#[test]
fn front_ends_have_findings() {
    let cases: &[Case] = &[
        (
            |facts| {
                facts.exports[0].details.status.lacks_memory = true;
                front_end(facts).session.memory.regions = 0;
                // The one finding matters.
                front_end(facts).session.features.clear();
            },
            Harmful,
            "memory-not-shared",
            &["process 4711", "shares 0 regions"],
        ),
        (
            |facts| {
                let details = &mut facts.exports[0].details;
                details.status.state = ExportState::Opening;
                (details.front_end, details.disks) = (None, Vec::new());
                facts.exports[0].stats = None;
            },
            Harmful,
            "not-served",
            &["still being opened"],
        ),
        (
            |facts| {
                facts.exports[0].details.front_end = None;
                facts.exports[0].details.status.sessions = 3;
            },
            Note,
            "no-front-end",
            &["after 3 so far"],
        ),
        (
            |facts| front_end(facts).session.protocol_features = vec!["config".into()],
            Warning,
            "no-inflight-region",
            &["process 4711", "negotiated: config"],
        ),
    ];
    check(cases, Some("vm1"));
}

#[test]
fn front_ends_that_do_not_connect_again_are_found() {
    let cases: &[Case] = &[
        (
            |facts| facts.exports[0].command_line[2] = "socket,id=a,path=vm1.sock".into(),
            Warning,
            "no-reconnect",
            &["qemu has -chardev socket,id=a,path=vm1.sock"],
        ),
        (
            |facts| {
                facts.exports[0].command_line[2] = "socket,path=/run/vm1.sock,reconnect=0".into();
            },
            Warning,
            "no-reconnect",
            &["reconnect=0"],
        ),
        (
            |facts| facts.exports[0].command_line = vec!["/usr/bin/firecracker".into()],
            Warning,
            "no-reconnect",
            &["firecracker never", "when the daemon restarts"],
        ),
        (
            |facts| {
                facts.exports[0].command_line = vec!["/usr/bin/firecracker".into()];
                front_end(facts).session.protocol_features = vec!["config".into()];
                // systemd has the connection and a region.
                front_end(facts).kept = true;
            },
            Warning,
            "no-reconnect",
            &["when the daemon is stopped"],
        ),
        (
            |facts| facts.exports[0].command_line = vec!["/usr/bin/alioth".into()],
            Warning,
            "no-reconnect",
            &["alioth never"],
        ),
        (
            |facts| facts.exports[0].command_line[2] = "virtio_uml.device=/run/vm1.sock:2".into(),
            Warning,
            "no-reconnect",
            &["User Mode Linux never"],
        ),
    ];
    check(cases, Some("vm1"));
}

#[test]
fn queues_have_findings() {
    let cases: &[Case] = &[
        (
            |facts| front_end(facts).session.features = vec!["flush".into()],
            Note,
            "no-event-idx",
            &["negotiated flush, without"],
        ),
        (
            |facts| {
                front_end(facts).session.queues[0].size = 32;
                facts.exports[0].stats.as_mut().unwrap()[1].depth_peak = 23;
            },
            Note,
            "small-queue",
            &["32 entries", "were 23"],
        ),
        (
            |facts| {
                let queues = &mut front_end(facts).session.queues;
                (queues[1].size, queues[1].state) = (32, QueueState::Running);
                facts.exports[0].stats.as_mut().unwrap()[1].depth_peak = 24;
            },
            Warning,
            "small-queue",
            &["32 entries", "were 24"],
        ),
        (
            |facts| facts.exports[0].stats.as_mut().unwrap()[1].depth_peak = 96,
            Warning,
            "small-queue",
            &["128 entries", "were 96"],
        ),
    ];
    check(cases, Some("vm1"));
}

/// The features of a front-end without running queues are not final.
#[test]
fn front_ends_that_are_about_to_start_have_no_findings() {
    for change in [
        (|facts| {
            front_end(facts).session.queues[0].state = QueueState::Stopped;
            front_end(facts).session.features.clear();
            front_end(facts).session.protocol_features.clear();
        }) as fn(&mut Facts),
        |facts| {
            facts.exports[0].details.front_end = None;
            facts.exports[0].details.status.sessions = 0;
        },
        |facts| {
            facts.exports[0].details.front_end = None;
            facts.exports[0].details.status.state = ExportState::Stopping;
        },
        |facts| {
            front_end(facts).session.protocol_features.clear();
            facts.exports[0].details.status.spec.settings.in_order = true;
        },
        |facts| {
            // A control queue is small.
            front_end(facts).session.queues[1].size = 4;
            front_end(facts).session.queues[1].state = QueueState::Running;
            front_end(facts).session.queues[1].role = QueueRole::Control;
        },
        |facts| facts.exports[0].command_line[2] = "socket,path=/run/other.sock".into(),
    ] {
        let mut facts = healthy();
        change(&mut facts);
        assert_eq!(examine(&facts), []);
    }
}

#[test]
fn disks_have_findings() {
    let cases: &[Case] = &[
        (
            |facts| {
                disk(facts).state = DiskState::Late;
                disk(facts).state_seconds = Some(70);
                disk(facts).remark = Some("1 of 2".into());
            },
            Harmful,
            "disk-state",
            &["file /vm1.img", "not answered", "for 70 s (1 of 2)"],
        ),
        (|facts| disk(facts).state = DiskState::Held, Harmful, "disk-state", &["no space"]),
        (|facts| disk(facts).state = DiskState::Retried, Harmful, "disk-state", &["which wait"]),
        (|facts| disk(facts).state = DiskState::Away, Harmful, "disk-state", &["be reached"]),
        (|facts| disk(facts).state = DiskState::Lost, Harmful, "disk-state", &["lost written"]),
        (
            |facts| disk(facts).warning = Some("the header of a qcow2 image".into()),
            Warning,
            "disk-content",
            &["qcow2"],
        ),
        (
            |facts| {
                disk(facts).engine = Some("aio".into());
                disk(facts).engine_reason = Some("cannot set up io_uring: EPERM".into());
            },
            Warning,
            "engine-fallback",
            &["the engine aio: cannot set up io_uring: EPERM"],
        ),
        (
            |facts| disk(facts).engine_reason = Some("the trial with aio failed: EIO".into()),
            Note,
            "engine-fallback",
            &["EIO"],
        ),
        (|facts| disk(facts).direct = false, Warning, "direct-io-refused", &["O_DIRECT"]),
        (
            |facts| {
                disk(facts).direct = false;
                facts.exports[0].details.status.spec.settings.cache = Some(CacheMode::Writeback);
            },
            Note,
            "page-cache",
            &["cache=writeback"],
        ),
    ];
    check(cases, Some("vm1"));
}

#[test]
fn requests_to_disks_have_findings() {
    let cases: &[Case] = &[
        (
            |facts| {
                let device = BlockDevice { requests: 10, request_ms: 47, busy_ms: 1_900 };
                facts.exports[0].devices[0] = Some([BlockDevice::default(), device]);
                let read = &mut facts.exports[0].stats.as_mut().unwrap()[1].operations[0];
                (read.requests, read.latency_sum_ns) = (5, 30_500_000);
            },
            Warning,
            "disk-saturated",
            &["device 8:0", "95%", "10 requests took 4.7 ms", "the export 6.1 ms"],
        ),
        (
            |facts| {
                let errors = &mut facts.exports[0].stats.as_mut().unwrap()[1].operations[0].errors;
                (errors.disk, errors.no_space) = (3, 4);
            },
            Harmful,
            "failed-requests",
            &["failed 3 requests, and 4 for lack", "7 of them"],
        ),
        (
            |facts| {
                for stats in facts.exports[0].stats.as_mut().unwrap() {
                    stats.operations[0].errors.disk = 3;
                }
            },
            Note,
            "failed-requests",
            &["failed 3 requests", "0 of them"],
        ),
        (
            |facts| {
                facts.exports[0].stats.as_mut().unwrap()[1].throttled_ns = 3_100_000_000;
                disk(facts).rules.limits.iops_total = Some(50);
            },
            Warning,
            "throttled",
            &["1.55 requests", "limits: iops-total=50"],
        ),
        (
            |facts| {
                let unit = json!({ "target": 0, "lun": 7, "waiting-requests": 2 });
                facts.exports[0].details.missing_units = vec![read(unit)];
            },
            Harmful,
            "missing-unit",
            &["2 requests", "0:7"],
        ),
    ];
    check(cases, Some("vm1"));
}

/// A null disk has no page cache, a fast device may be busy, and a short wait for limits is normal.
#[test]
fn disks_with_normal_figures_have_no_findings() {
    for change in [
        (|facts| (disk(facts).direct, disk(facts).engine) = (false, None)) as fn(&mut Facts),
        |facts| {
            let device = BlockDevice { requests: 10_000, request_ms: 9_000, busy_ms: 2_000 };
            facts.exports[0].devices[0] = Some([BlockDevice::default(), device]);
            let read = &mut facts.exports[0].stats.as_mut().unwrap()[1].operations[0];
            (read.requests, read.latency_sum_ns) = (10_000, 9_000_000_000);
        },
        |facts| facts.exports[0].stats.as_mut().unwrap()[1].throttled_ns = 190_000_000,
        |facts| facts.exports[0].stats = None,
    ] {
        let mut facts = healthy();
        change(&mut facts);
        assert_eq!(examine(&facts), []);
    }
}

/// The mode of a unit has precedence over that of its export.
#[test]
fn the_page_cache_is_meant_if_the_unit_has_its_mode() {
    for (of_unit, name) in [
        (None, "page-cache"),
        (Some("none"), "direct-io-refused"),
        (Some("writethrough"), "page-cache"),
    ] {
        let mut facts = healthy();
        disk(&mut facts).direct = false;
        let unit =
            json!({ "lun": 0, "disk": { "file": "/vm1.img" }, "settings": { "cache": of_unit } });
        let spec = &mut facts.exports[0].details.status.spec;
        spec.device = read(json!({ "scsi": [unit] }));
        spec.settings.cache = Some(CacheMode::Writeback);
        let found = examine(&facts);
        let [finding] = &found[..] else { panic!("{found:#?}") };
        assert_eq!(finding.finding, name, "{of_unit:?}: {finding:?}");
        let mode = of_unit.filter(|mode| *mode != "none").unwrap_or("writeback");
        let is_named = finding.figure.contains(&format!("cache={mode}"));
        assert_eq!(is_named, name == "page-cache", "{finding:?}");
    }
}

/// Findings of export and host together, the worst first.
#[test]
fn findings_are_ordered_by_harm() {
    let mut facts = healthy();
    facts.process.dropped_log_lines = 5;
    disk(&mut facts).state = DiskState::Lost;
    front_end(&mut facts).session.features.clear();
    let names: Vec<_> = examine(&facts).iter().map(|finding| finding.finding).collect();
    assert_eq!(names, ["disk-state", "dropped-log-lines", "no-event-idx"]);
}
