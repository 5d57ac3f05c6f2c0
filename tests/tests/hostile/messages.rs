//! Messages that are cut short, too long, out of order, or nonsense.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::DaemonOptions;
use ringhaul_kit::frontend::message::{
    Channel, HEADER_BYTES, Message, NEED_REPLY, NO_FD, REPLY, VERSION, code,
};
use ringhaul_kit::frontend::ring::layout_at;
use ringhaul_kit::frontend::{
    BORDER, Frontend, MEMORY_END, MEMORY_START, Setup, check_service, feature,
};
use ringhaul_kit::server::Engine;
use virtqueue::QueueConfig;

use crate::{start, with_attached, with_negotiated};

fn daemon() -> Result<ringhaul_kit::daemon::Daemon> {
    start(&DaemonOptions::new(Engine::Aio))
}

/// The messages of a whole session that used both queues. A sender that repeats them must keep the
/// memory.
fn whole_session(frontend: &mut Frontend) -> Result<Vec<Message>> {
    frontend.write(0, 5000, &[1; 512])?;
    frontend.config(0, 60)?;
    frontend.stop_queue(1)?;
    Ok(frontend.channel.sent.clone())
}

#[test]
fn a_session_that_ends_after_any_byte() -> Result<()> {
    let mut daemon = daemon()?;
    let descriptors = daemon.descriptors()?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    let messages = whole_session(&mut frontend)?;
    let Frontend { channel, memory: _memory, rings: _rings, .. } = frontend;
    drop(channel);
    for (whole, message) in messages.iter().enumerate() {
        let bytes = message.bytes();
        for cut in 0..bytes.len() {
            let mut channel = Channel::connect(daemon.socket())?;
            for message in &messages[..whole] {
                channel.send(message)?;
            }
            if cut > 0 {
                channel.send_bytes(&bytes[..cut], &message.fds)?;
            }
            drop(channel);
            check_service(&mut daemon)
                .with_context(|| format!("after {cut} bytes of {message:?}, number {whole}"))?;
        }
    }
    daemon.wait_released(&descriptors)
}

#[test]
fn every_request_with_every_size() -> Result<()> {
    let mut daemon = daemon()?;
    let sizes = [
        0,
        1,
        4,
        7,
        8,
        9,
        12,
        16,
        20,
        24,
        32,
        40,
        41,
        48,
        264,
        4095,
        4096,
        4097,
        0x1_0000,
        u32::MAX,
    ];
    for request in 0..=code::MAX {
        for size in sizes {
            for fill in [0, 1] {
                let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
                frontend.negotiate()?;
                // A body that is longer than any message is announced and not sent.
                let sent = if size > 4097 { 0 } else { usize::try_from(size)? };
                let mut message = Message::new(request, vec![fill; sent]);
                message.size = size;
                // The daemon may close the connection before it has all bytes.
                let _ = frontend.channel.send(&message);
                drop(frontend);
                check_service(&mut daemon)
                    .with_context(|| format!("after request {request} of {size} bytes"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn flags_that_make_no_sense() -> Result<()> {
    let mut daemon = daemon()?;
    for request in [code::GET_FEATURES, code::SET_OWNER, code::GET_QUEUE_NUM, code::SET_FEATURES] {
        for flags in [0, 2, 3, VERSION | REPLY, VERSION | REPLY | NEED_REPLY, VERSION | 1 << 4, !0]
        {
            let what = format!("request {request} with flags {flags:#x}");
            with_negotiated(&mut daemon, &what, |frontend| {
                let body = if request == code::SET_FEATURES { vec![0; 8] } else { Vec::new() };
                let mut message = Message::new(request, body);
                message.flags = flags;
                let reply = frontend.channel.exchange(&message)?;
                ensure!(reply.is_none(), "it was answered: {reply:?}");
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn bytes_that_are_no_message() -> Result<()> {
    let mut daemon = daemon()?;
    for bytes in [
        b"GET / HTTP/1.0\r\n\r\n".to_vec(),
        vec![0; 4096],
        vec![0xff; 4096],
        [Message::new(code::GET_FEATURES, Vec::new()).bytes(), vec![0x55; 100]].concat(),
    ] {
        let mut channel = Channel::connect(daemon.socket())?;
        channel.send_bytes(&bytes, &[])?;
        channel.wait_closed().with_context(|| format!("after {bytes:x?}"))?;
        check_service(&mut daemon)?;
    }
    Ok(())
}

#[test]
fn requests_that_were_not_offered() -> Result<()> {
    let mut daemon = daemon()?;
    for request in [
        code::SET_LOG_BASE,
        code::SET_LOG_FD,
        code::GET_INFLIGHT_FD,
        code::RESET_DEVICE,
        19, // SEND_RARP
        20, // NET_SET_MTU
        22, // IOTLB_MSG
        28, // POSTCOPY_ADVISE
        33, // GPU_SET_SOCKET
        39, // SET_STATUS
        40, // GET_STATUS
        41, // GET_SHARED_OBJECT
    ] {
        let what = format!("request {request}");
        with_negotiated(&mut daemon, &what, |frontend| {
            let reply =
                frontend.channel.exchange(&Message::new(request, Vec::new()).needs_reply())?;
            ensure!(reply.is_none_or(|reply| reply.number().is_ok_and(|status| status != 0)));
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn features_that_were_not_offered() -> Result<()> {
    let mut daemon = daemon()?;
    for bit in [0, 1, 3, 5, 7, 16, 24, 31, 33, 35, 40, 63] {
        let what = format!("feature {bit}");
        with_negotiated(&mut daemon, &what, |frontend| {
            let features = frontend.features | 1 << bit;
            frontend.expect_refused(Message::number(code::SET_FEATURES, features))
        })?;
    }
    for bit in [2, 4, 6, 8, 10, 11, 14, 17, 20, 63] {
        let what = format!("protocol feature {bit}");
        with_negotiated(&mut daemon, &what, |frontend| {
            frontend.expect_refused(Message::number(code::SET_PROTOCOL_FEATURES, 1 << 3 | 1 << bit))
        })?;
    }
    Ok(())
}

#[test]
fn messages_out_of_order() -> Result<()> {
    let mut daemon = daemon()?;
    let whole = {
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        whole_session(&mut frontend)?
    };
    // Each message alone; all in reverse; each twice; all twice; each left out.
    let mut orders: Vec<Vec<&Message>> = whole.iter().map(|message| vec![message]).collect();
    orders.push(whole.iter().rev().collect());
    orders.push(whole.iter().flat_map(|message| [message, message]).collect());
    orders.push(whole.iter().chain(&whole).collect());
    for left_out in 0..whole.len() {
        let kept = whole.iter().enumerate().filter(|(index, _)| *index != left_out);
        orders.push(kept.map(|(_, message)| message).collect());
    }
    for (index, order) in orders.iter().enumerate() {
        let mut channel = Channel::connect(daemon.socket())?;
        for message in order {
            // The daemon may already have closed the connection.
            if channel.send(message).is_err() {
                break;
            }
        }
        drop(channel);
        check_service(&mut daemon).with_context(|| format!("after order {index}"))?;
    }
    Ok(())
}

#[test]
fn early_messages_are_not_lost() -> Result<()> {
    let mut daemon = daemon()?;
    with_negotiated(&mut daemon, "the base of a ring that never started", |frontend| {
        assert_eq!(frontend.stop_queue(0)?, 0);
        Ok(())
    })?;
    with_negotiated(&mut daemon, "enable, kick, memory", |frontend| {
        for queue in [0, 1] {
            frontend.enable_queue(queue, true)?;
            frontend.start_queue(queue, 0)?;
        }
        frontend.share_memory()?;
        frontend.read(0, 0, 512)?;
        frontend.read(1, 0, 512)?;
        Ok(())
    })?;
    with_negotiated(&mut daemon, "features again while the queues run", |frontend| {
        frontend.share_memory()?;
        for queue in [0, 1] {
            frontend.start_queue(queue, 0)?;
            frontend.enable_queue(queue, true)?;
        }
        frontend.read(0, 0, 512)?;
        frontend.send_checked(Message::number(code::SET_FEATURES, frontend.features))?;
        frontend.read(0, 0, 512)?;
        // Event idx is off from here on.
        let fewer = frontend.features & !feature::EVENT_IDX;
        frontend.send_checked(Message::number(code::SET_FEATURES, fewer))?;
        frontend.rings[0].config.event_idx = false;
        frontend.read(0, 0, 512)?;
        Ok(())
    })?;
    with_attached(&mut daemon, &Setup::default(), "an owner that goes away", |frontend| {
        frontend.read(0, 0, 512)?;
        frontend.send_checked(Message::new(code::RESET_OWNER, Vec::new()))?;
        // All rings are as after GET_VRING_BASE; a session may follow.
        for queue in [0, 1] {
            let base = frontend.stop_queue(queue)?;
            frontend.start_queue(queue, base)?;
            frontend.enable_queue(queue, true)?;
            frontend.read(queue, 0, 512)?;
        }
        Ok(())
    })
}

#[test]
fn queues_that_do_not_exist() -> Result<()> {
    let mut daemon = daemon()?;
    for index in [2, 3, 255, 256, 0x1_0000, 0x8000_0000, u32::MAX] {
        for request in [code::SET_VRING_NUM, code::SET_VRING_BASE, code::SET_VRING_ENABLE] {
            let what = format!("request {request} for queue {index}");
            with_negotiated(&mut daemon, &what, |frontend| {
                frontend.expect_refused(Message::ring_state(request, index, 1))
            })?;
        }
        let what = format!("addresses of queue {index}");
        with_negotiated(&mut daemon, &what, |frontend| {
            frontend.share_memory()?;
            let mut message = frontend.address_message(0)?;
            message.body[..4].copy_from_slice(&index.to_ne_bytes());
            frontend.expect_refused(message)
        })?;
        let what = format!("the base of queue {index}");
        with_negotiated(&mut daemon, &what, |frontend| {
            let message = Message::ring_state(code::GET_VRING_BASE, index, 0);
            ensure!(frontend.channel.exchange(&message)?.is_none(), "there was an answer");
            Ok(())
        })?;
        let Ok(index) = u8::try_from(index) else { continue };
        for request in [code::SET_VRING_KICK, code::SET_VRING_CALL, code::SET_VRING_ERR] {
            let what = format!("request {request} for queue {index}");
            with_negotiated(&mut daemon, &what, |frontend| {
                let fd = std::sync::Arc::clone(&frontend.rings[0].kick);
                frontend.expect_refused(Message::ring_fd(request, index, Some(&fd)))
            })?;
            with_negotiated(&mut daemon, &what, |frontend| {
                frontend.expect_refused(Message::number(request, u64::from(index) | NO_FD))
            })?;
        }
    }
    Ok(())
}

#[test]
fn impossible_numbers_of_rings() -> Result<()> {
    let mut daemon = daemon()?;
    for size in [0, 3, 5, 100, 1023, 1025, 2048, 32_768, 65_535, 65_536, u32::MAX] {
        with_negotiated(&mut daemon, &format!("{size} entries"), |frontend| {
            frontend.expect_refused(Message::ring_state(code::SET_VRING_NUM, 0, size))
        })?;
    }
    for base in [65_536, 0x8000_0000, u32::MAX] {
        with_negotiated(&mut daemon, &format!("base {base}"), |frontend| {
            frontend.expect_refused(Message::ring_state(code::SET_VRING_BASE, 0, base))
        })?;
    }
    for value in [2, 255, u32::MAX] {
        with_negotiated(&mut daemon, &format!("enable {value}"), |frontend| {
            frontend.expect_refused(Message::ring_state(code::SET_VRING_ENABLE, 0, value))
        })?;
    }
    Ok(())
}

/// A queue with a misplaced part is never served. The daemon reports the fault in reply to a
/// message or through the err eventfd.
#[test]
fn misplaced_rings() -> Result<()> {
    let mut daemon = daemon()?;
    let good = layout_at(MEMORY_START, 64);
    let cases = [
        ("descriptors not aligned", QueueConfig { desc_table: good.desc_table + 8, ..good }),
        ("avail ring not aligned", QueueConfig { avail_ring: good.avail_ring + 1, ..good }),
        ("used ring not aligned", QueueConfig { used_ring: good.used_ring + 2, ..good }),
        ("descriptors past the end", QueueConfig { desc_table: MEMORY_END - 16, ..good }),
        ("avail ring past the end", QueueConfig { avail_ring: MEMORY_END - 4, ..good }),
        ("avail event past the end", QueueConfig { avail_ring: MEMORY_END - 4 - 2 * 64, ..good }),
        ("used ring past the end", QueueConfig { used_ring: MEMORY_END - 4, ..good }),
        ("used event past the end", QueueConfig { used_ring: MEMORY_END - 4 - 8 * 64, ..good }),
        ("descriptors across regions", QueueConfig { desc_table: BORDER - 512, ..good }),
        ("avail ring across regions", QueueConfig { avail_ring: BORDER - 64, ..good }),
        ("used ring across regions", QueueConfig { used_ring: BORDER - 256, ..good }),
    ];
    for (what, place) in cases {
        with_attached(&mut daemon, &Setup::default(), what, |frontend| {
            frontend.stop_queue(1)?;
            frontend.rings[1].config = place;
            let refused = frontend.start_queue(1, 0).is_err();
            if !refused {
                frontend.rings[1].wait_err()?;
            }
            Ok(())
        })?;
    }
    // Addresses that are in no region.
    for addr in [0, 0x1000, MEMORY_START, 1 << 46, !0xfff, u64::MAX - 15] {
        for part in 0..3 {
            let what = format!("part {part} of a ring at address {addr:#x}");
            with_attached(&mut daemon, &Setup::default(), &what, |frontend| {
                frontend.stop_queue(1)?;
                let mut message = frontend.address_message(1)?;
                message.body[8 + 8 * part..16 + 8 * part].copy_from_slice(&addr.to_ne_bytes());
                let kick = std::sync::Arc::clone(&frontend.rings[1].kick);
                let refused = frontend.send_checked(message).is_err()
                    || frontend
                        .send_checked(Message::ring_fd(code::SET_VRING_KICK, 1, Some(&kick)))
                        .is_err();
                ensure!(refused, "the queue was started");
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn configuration_reads_that_make_no_sense() -> Result<()> {
    let mut daemon = daemon()?;
    let body = |offset: u32, size: u32, flags: u32, bytes: usize| {
        let head = [offset, size, flags].map(u32::to_ne_bytes).concat();
        [head, vec![0; bytes]].concat()
    };
    for (what, body) in [
        ("no bytes", body(0, 0, 0, 0)),
        ("fewer bytes than announced", body(0, 60, 0, 59)),
        ("more bytes than announced", body(0, 60, 0, 61)),
        ("beyond the space", body(4096, 1, 0, 1)),
        ("past the end of the space", body(4095, 2, 0, 2)),
        ("past the end of all offsets", body(u32::MAX, 60, 0, 60)),
        ("a huge size", body(0, u32::MAX, 0, 60)),
        ("unknown flags", body(0, 60, 0xff, 60)),
        ("half a header", vec![0; HEADER_BYTES - 1]),
    ] {
        for request in [code::GET_CONFIG, code::SET_CONFIG] {
            with_negotiated(&mut daemon, what, |frontend| {
                let message = Message::new(request, body.clone()).needs_reply();
                let reply = frontend.channel.exchange(&message)?;
                // A device refuses a read with a reply without data.
                let refused = match &reply {
                    None => true,
                    Some(reply) if request == code::GET_CONFIG => reply.body.len() <= HEADER_BYTES,
                    Some(reply) => reply.number()? != 0,
                };
                ensure!(refused, "request {request} was carried out: {reply:?}");
                Ok(())
            })?;
        }
    }
    Ok(())
}
