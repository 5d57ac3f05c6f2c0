//! Features, limits and the configuration space, as front-ends read them.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::DaemonOptions;
use ringhaul_kit::frontend::message::{Channel, HEADER_BYTES, Message, NEED_REPLY, code};
use ringhaul_kit::frontend::{Frontend, Setup, blk, check_service, feature, protocol_feature};
use ringhaul_kit::server::{Cache, Engine};

use crate::start;

/// The features that every virtio-blk device offers.
const ALWAYS: u64 = feature::VERSION_1
    | feature::LOG_ALL
    | feature::ANY_LAYOUT
    | feature::INDIRECT_DESC
    | feature::EVENT_IDX
    | feature::RING_PACKED
    | feature::SEG_MAX
    | feature::BLK_SIZE
    | feature::TOPOLOGY
    | feature::FLUSH
    | feature::CONFIG_WCE
    | feature::PROTOCOL_FEATURES;

const WRITEBACK: u32 = 32;

#[test]
fn offered_features_match_the_disk() -> Result<()> {
    let writable = feature::DISCARD | feature::WRITE_ZEROES;
    for (queues, read_only, expected) in [
        (1, false, ALWAYS | writable),
        (2, false, ALWAYS | writable | feature::MQ),
        (2, true, ALWAYS | feature::MQ | feature::RO),
    ] {
        let mut options = DaemonOptions::new(Engine::Aio);
        options.num_queues = queues;
        if read_only {
            options = options.with("--read-only", "");
        }
        let daemon = start(&options)?;
        let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
        let offered = frontend.exchange_number(&Message::new(code::GET_FEATURES, Vec::new()))?;
        assert_eq!(offered, expected, "{offered:#x} of {options:?}");
    }
    Ok(())
}

#[test]
fn features_of_virtio_scsi_are_offered() -> Result<()> {
    const HOTPLUG: u64 = 1 << 1;
    const CHANGE: u64 = 1 << 2;
    let mut options = DaemonOptions::new(Engine::Aio);
    options.is_scsi = true;
    let daemon = start(&options)?;
    let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
    let offered = frontend.exchange_number(&Message::new(code::GET_FEATURES, Vec::new()))?;
    let expected = feature::VERSION_1
        | feature::LOG_ALL
        | feature::ANY_LAYOUT
        | feature::INDIRECT_DESC
        | feature::EVENT_IDX
        | feature::RING_PACKED
        | feature::PROTOCOL_FEATURES
        | HOTPLUG
        | CHANGE;
    assert_eq!(offered, expected, "{offered:#x}");
    Ok(())
}

/// An older driver accepts a feature that its front-end offers for every back-end.
#[test]
fn an_older_driver_accepts_any_layout() -> Result<()> {
    for is_scsi in [false, true] {
        let mut options = DaemonOptions::new(Engine::Aio);
        options.is_scsi = is_scsi;
        let daemon = start(&options)?;
        let features = feature::ANY_LAYOUT | feature::INDIRECT_DESC;
        let setup = Setup { features, ..Setup::default() };
        let mut frontend = Frontend::connect(daemon.socket(), &setup)?;
        frontend.negotiate()?;
        assert_eq!(frontend.features, features | feature::PROTOCOL_FEATURES);
    }
    Ok(())
}

#[test]
fn limits_are_announced() -> Result<()> {
    let mut options = DaemonOptions::new(Engine::Aio);
    options.num_queues = 7;
    let mut daemon = start(&options)?;
    let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
    frontend.negotiate()?;
    let query = |code| Message::new(code, Vec::new());
    let offered = frontend.exchange_number(&query(code::GET_PROTOCOL_FEATURES))?;
    assert_eq!(
        offered,
        protocol_feature::MQ
            | protocol_feature::LOG_SHMFD
            | protocol_feature::REPLY_ACK
            | protocol_feature::BACKEND_REQ
            | protocol_feature::CONFIG
            | protocol_feature::INFLIGHT_SHMFD
            | protocol_feature::RESET_DEVICE
            | protocol_feature::CONFIGURE_MEM_SLOTS
            | protocol_feature::STATUS
            | protocol_feature::GET_VRING_BASE_INFLIGHT
            | protocol_feature::GET_VRING_BASE_SKIP_DRAIN
    );
    assert_eq!(frontend.exchange_number(&query(code::GET_QUEUE_NUM))?, 7);
    assert_eq!(frontend.exchange_number(&query(code::GET_MAX_MEM_SLOTS))?, 509);
    assert_eq!(frontend.config(34, 2)?, 7_u16.to_le_bytes());
    drop(frontend);
    check_service(&mut daemon)
}

#[test]
fn the_configuration_is_read_in_every_manner() -> Result<()> {
    let daemon = start(&DaemonOptions::new(Engine::Aio).with("--queue-size", "256"))?;
    let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
    frontend.negotiate()?;
    let config = frontend.config(0, 60)?;
    let field = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| config[at + byte]));
    assert_eq!(config[..8], ((16_u64 << 20) / 512).to_le_bytes(), "capacity");
    assert_eq!(field(8), 0, "size_max is not offered");
    assert_eq!(field(12), 254, "seg_max");
    assert_eq!(field(20), 512, "blk_size");
    assert_eq!(config[32], 1, "writeback");
    // Offsets from the start of the configuration and with 256 bytes added; ranges that are whole,
    // partial, and beyond the end.
    for start in [0, 0x100] {
        for (offset, bytes) in [
            (0, 60),
            (0, 1),
            (0, 7),
            (0, 8),
            (8, 8),
            (3, 17),
            (32, 1),
            (59, 1),
            (59, 2),
            (60, 1),
            (61, 30),
            (0, 61),
            (0, 96),
            (0, 255),
            (0, 256),
            (200, 40),
            (0x200, 60),
            (0x220, 1),
        ] {
            let seen = frontend.config(start + offset, bytes)?;
            let from = usize::try_from(offset)?;
            let expected: Vec<u8> =
                (from..from + bytes).map(|at| config.get(at).copied().unwrap_or(0)).collect();
            ensure!(seen == expected, "{bytes} bytes at {start:#x} + {offset}");
        }
    }
    // The largest range that fits into a message.
    assert_eq!(frontend.config(0, 4096 - HEADER_BYTES)?[..60], config);
    Ok(())
}

#[test]
fn the_driver_sets_the_write_cache() -> Result<()> {
    for (cache, has_cache) in [(Cache::None, true), (Cache::Writethrough, false)] {
        let mut options = DaemonOptions::new(Engine::Threads);
        options.cache = cache;
        let mut daemon = start(&options)?;
        let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
        frontend.negotiate()?;
        let initial = u8::from(has_cache);
        assert_eq!(frontend.config(WRITEBACK, 1)?, [initial]);
        for value in [0, 1, 0, 2, 0, 0xff] {
            for base in [0, 0x100] {
                frontend.send_checked(Message::config(
                    code::SET_CONFIG,
                    base + WRITEBACK,
                    &[value],
                ))?;
                // A device without a cache stays write-through, regardless of the driver.
                assert_eq!(frontend.config(WRITEBACK, 1)?, [u8::from(value != 0) & initial]);
            }
        }
        // The next driver starts with the initial value.
        drop(frontend);
        let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
        frontend.negotiate()?;
        assert_eq!(frontend.config(WRITEBACK, 1)?, [initial]);
        drop(frontend);
        check_service(&mut daemon)?;
    }
    Ok(())
}

/// Drivers of one guest follow one another on a connection. Different features mean another driver.
/// The same features may mean a paused guest, which relies on its choice.
#[test]
fn the_write_cache_is_the_drivers_choice() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Threads))?;
    let features = Setup::default().features | feature::CONFIG_WCE;
    let mut frontend = Frontend::connect(daemon.socket(), &Setup { features, ..Setup::default() })?;
    let set = |frontend: &mut Frontend, value| {
        frontend.send_checked(Message::config(code::SET_CONFIG, WRITEBACK, &[value]))?;
        frontend.config(WRITEBACK, 1)
    };
    let negotiate = |frontend: &mut Frontend, features: u64| {
        let features = features | feature::PROTOCOL_FEATURES;
        frontend.send_checked(Message::number(code::SET_FEATURES, features))?;
        frontend.config(WRITEBACK, 1)
    };
    frontend.negotiate()?;
    assert_eq!(set(&mut frontend, 0)?, [0]);
    for value in [2, 0x80, 0xff] {
        assert_eq!(set(&mut frontend, value)?, [1], "any value but 0 is 1");
    }
    // A paused guest continues with its choice.
    assert_eq!(set(&mut frontend, 0)?, [0]);
    assert_eq!(negotiate(&mut frontend, features)?, [0]);
    // Another driver finds the initial cache, unless it cannot flush.
    assert_eq!(negotiate(&mut frontend, features & !feature::EVENT_IDX)?, [1]);
    assert_eq!(negotiate(&mut frontend, features & !feature::FLUSH)?, [0]);
    for value in [1, 2] {
        assert_eq!(set(&mut frontend, value)?, [0], "a cache that nobody can flush");
    }
    assert_eq!(negotiate(&mut frontend, features)?, [1]);
    drop(frontend);
    check_service(&mut daemon)
}

#[test]
fn other_fields_cannot_be_written() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    for (offset, data) in [
        (0, &[0; 8][..]),
        (0, &[0; 60]),
        (20, &[0, 16, 0, 0]),
        (31, &[0, 0]),
        (WRITEBACK, &[0, 0]),
        (34, &[1, 0]),
        (60, &[0]),
        (0x100, &[0]),
        (0x200, &[0]),
        (0x220, &[0]),
        (0xf00, &[0]),
    ] {
        let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
        frontend.negotiate()?;
        let before = frontend.config(0, 60)?;
        let mut message = Message::config(code::SET_CONFIG, offset, data);
        message.flags |= NEED_REPLY;
        if let Some(reply) = frontend.channel.exchange(&message)? {
            ensure!(reply.number()? != 0, "{data:?} was taken at {offset}");
        }
        drop(frontend);
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        ensure!(frontend.config(0, 60)? == before, "{data:?} at {offset} changed something");
        ensure!(frontend.request(0, blk::IN, 0, &[], 512)?.status == blk::OK);
        drop(frontend);
        check_service(&mut daemon)?;
    }
    Ok(())
}

/// A front-end may write the header and the body of a message separately, and the header byte by
/// byte.
#[test]
fn messages_may_arrive_in_pieces() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    frontend.config(0, 60)?;
    let messages = frontend.channel.sent.clone();
    drop(frontend);
    let in_two: fn(&Message) -> Vec<usize> = |_| vec![HEADER_BYTES];
    let in_header: fn(&Message) -> Vec<usize> = |_| (1..HEADER_BYTES).collect();
    for (what, cuts) in [("header and body", in_two), ("header in bytes", in_header)] {
        let mut channel = Channel::connect(daemon.socket())?;
        for (index, message) in messages.iter().enumerate() {
            let (bytes, cuts) = (message.bytes(), cuts(message));
            let starts = [vec![0], cuts.clone()].concat();
            let ends = [cuts, vec![bytes.len()]].concat();
            for (start, end) in starts.into_iter().zip(ends) {
                let fds = if start == 0 { &message.fds[..] } else { &[] };
                let sent = channel.send_bytes(&bytes[start..end], fds);
                sent.with_context(|| format!("{what}, message {index}"))?;
                std::thread::yield_now();
            }
            let queries = [code::GET_FEATURES, code::GET_PROTOCOL_FEATURES, code::GET_CONFIG];
            if message.flags & NEED_REPLY == 0 && !queries.contains(&message.request) {
                continue;
            }
            let reply = channel.receive()?;
            ensure!(
                reply.is_some_and(|reply| reply.request == message.request),
                "{what}: the daemon closed the connection at message {index}, {message:?}"
            );
        }
        drop(channel);
        check_service(&mut daemon)?;
    }
    Ok(())
}
