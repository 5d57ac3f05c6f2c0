//! The drawing of a plan's numbers.

use super::Plan;
use crate::rng::{Rng, flag, some};

impl Plan {
    pub(super) fn draw_stack(&mut self, rng: &mut Rng) {
        self.devices = rng.pick(&[1, 1, 2, 3]);
        self.mixed = flag(rng, 600);
        self.sound_disks = some(rng, 400, &[1, 2]);
        self.requests = rng.pick(&[20, 50, 100, 200, 300]);
        self.io_threads = rng.between(1, 3);
        self.depth = rng.pick(&[1, 2, 3, 4, 8, 64]);
        self.engine = rng.pick(&[0, 0, 0, 1, 2, 2, 2, 2]);
        self.defers = flag(rng, 500);
        self.sqpoll = flag(rng, 300);
        self.sq_entries = some(rng, 500, &[1, 2, 4, 16]);
        self.no_uring_cmd = flag(rng, 300);
        self.poll_ends = some(rng, 300, &[20, 300]);
        self.fixed_buffers = flag(rng, 300);
        self.own_loop = flag(rng, 600);
        self.poll_us = some(rng, 700, &[4, 20, 64, 500]);
        self.poll_percent = some(rng, 200, &[5, 50]);
        self.no_harvest_on_submit = flag(rng, 100);
        self.bounce_kib = some(rng, 500, &[16, 64]);
        self.submit_max = some(rng, 150, &[1, 2, 5]);
        self.getevents = flag(rng, 70);
        self.no_notify_batch = flag(rng, 100);
        self.run_max = some(rng, 200, &[1, 2, 16]);
        self.ring_unknown = flag(rng, 100);
        self.ring_slack = rng.pick(&[0, 0, 1, 2, 7, 61]);
        self.no_fdsync = flag(rng, 200);
    }

    pub(super) fn draw_disk(&mut self, rng: &mut Rng) {
        self.block_4k = flag(rng, 200);
        self.blocks = rng.pick(&[4, 8, 16, 24, 64]);
        self.direct = flag(rng, 700);
        self.small_align = flag(rng, 300);
        self.block_device = flag(rng, 400);
        self.read_only = flag(rng, 30);
        self.cut_sectors = if rng.chance(120) { rng.between(1, 12) } else { 0 };
        self.no_punch = flag(rng, 200);
        self.no_zero_range = flag(rng, 300);
        self.no_dsync = flag(rng, 200);
    }

    pub(super) fn draw_guest(&mut self, rng: &mut Rng) {
        self.queues = rng.between(1, 4);
        self.queue_log2 = rng.between(1, 5);
        self.first_index = rng.pick(&[0, 0, 1, 65_500, 65_535]);
        self.event_idx = flag(rng, 600);
        self.indirect = flag(rng, 600);
        self.no_write_cache = flag(rng, 200);
        self.no_flush = flag(rng, 150);
        self.no_wce = flag(rng, 300);
        self.no_kick = flag(rng, 30);
        self.no_call = flag(rng, 50);
        self.polls = some(rng, 200, &[50, 300]);
        self.batch = rng.pick(&[1, 1, 2, 4, 16]);
        self.reads = rng.pick(&[0, 5, 10, 20]);
        self.writes = rng.pick(&[3, 10, 10, 20]);
        self.flushes = some(rng, 600, &[1, 3, 10]);
        self.discards = some(rng, 300, &[1, 3]);
        self.zeroes = some(rng, 300, &[1, 3]);
        self.ids = some(rng, 200, &[1]);
        self.bads = some(rng, 300, &[1, 4]);
        self.request_blocks = rng.pick(&[1, 2, 4, 8, 16]);
        self.pieces = rng.pick(&[1, 2, 4, 9, 24]);
        self.aligned = rng.pick(&[0, 500, 1000]);
        self.odd_ranges = some(rng, 300, &[200, 1000]);
        self.region_kib = rng.pick(&[0, 0, 12, 20, 64]);
        self.no_overlap = flag(rng, 200);
    }

    /// Packed rings, of any size.
    pub(super) fn draw_layout(&mut self, rng: &mut Rng) {
        self.packed = flag(rng, 450);
        self.more_entries = some(rng, 600, &[1, 3, 5, 15]);
    }

    /// Migrations of the guests.
    pub(super) fn draw_migrations(&mut self, rng: &mut Rng) {
        self.migrations = some(rng, 400, &[1, 2, 4]);
        if self.migrations > 0 {
            self.log_changes = some(rng, 500, &[1, 3]);
            self.cancels = rng.pick(&[0, 300, 700]);
            self.log_takes = rng.pick(&[20, 200, 1000]);
        }
    }

    pub(super) fn draw_faults(&mut self, rng: &mut Rng) {
        self.short_reads = some(rng, 400, &[50, 300]);
        self.short_writes = some(rng, 400, &[50, 300]);
        self.odd_shorts = flag(rng, 300);
        self.eio = some(rng, 250, &[5, 30, 100]);
        self.enospc = some(rng, 150, &[5, 30]);
        self.flush_eio = some(rng, 100, &[50, 300]);
        self.eintr = some(rng, 250, &[20, 100]);
        self.eagain = some(rng, 250, &[20, 100]);
        self.stuck = some(rng, 30, &[5]);
        self.entry_reject = some(rng, 250, &[5, 30, 200]);
        self.no_submit_all = flag(rng, 400);
        self.submit_eagain = some(rng, 250, &[30, 200]);
        self.submit_eagain_burst = some(rng, 150, &[5, 30]);
        self.submit_partial = some(rng, 300, &[100, 500]);
        self.submit_reject = some(rng, 150, &[5, 20]);
        self.submit_eintr = some(rng, 200, &[50]);
        self.hang = some(rng, 200, &[5, 20]);
        self.sync = some(rng, 500, &[100, 500, 950, 990, 1000]);
        self.late_signal = some(rng, 500, &[100, 500, 1000]);
        self.tear = some(rng, 400, &[200, 1000]);
        self.latency_us = rng.pick(&[1, 20, 100, 100, 2000]);
        self.preempt = some(rng, 600, &[20, 100, 300]);
    }

    /// Bounds on the bytes of ops, and their times.
    pub(super) fn draw_bytes(&mut self, rng: &mut Rng) {
        self.op_kib = some(rng, 500, &[1, 2, 4, 16]);
        self.round_kib = some(rng, 500, &[1, 8, 32]);
        self.disk_kib = some(rng, 400, &[1, 16, 64]);
        self.byte_ns = some(rng, 500, &[1, 10, 50]);
        self.converts = flag(rng, 300);
        if self.converts > 0 {
            // Copies of a run must reach their bound.
            self.round_kib = rng.pick(&[1, 8, 32, 64]);
        }
    }

    pub(super) fn draw_control(&mut self, rng: &mut Rng) {
        self.stops = some(rng, 400, &[1, 4]);
        self.remaps = some(rng, 250, &[1, 3]);
        self.resets = some(rng, 250, &[1, 2]);
        self.set_calls = some(rng, 200, &[1, 3]);
        self.writebacks = some(rng, 250, &[1, 4]);
        self.crashes = some(rng, 400, &[1, 3]);
        self.kills = some(rng, 150, &[1, 2]);
    }

    /// A daemon that is killed.
    pub(super) fn draw_deaths(&mut self, rng: &mut Rng) {
        self.inflight = flag(rng, 500);
        self.deaths = some(rng, 600, &[1, 2, 3, 8]);
        self.in_order = flag(rng, 200);
    }

    /// A queue that is always busy, beside ordinary ones.
    pub(super) fn draw_rush(&mut self, rng: &mut Rng) {
        self.rush = some(rng, 100, &[200, 600]);
        if self.rush > 0 {
            self.sync = rng.pick(&[950, 1000, 1000]);
            // Each of the many requests would be tried again for seconds.
            self.stuck = 0;
            self.io_threads = rng.pick(&[1, 1, 2]);
            if self.devices == 1 {
                self.queues = self.queues.max(2);
            }
        }
    }

    /// The product's own numbers, and some runs that are long enough for them.
    pub(super) fn draw_scale(&mut self, rng: &mut Rng) {
        self.real_pacing = flag(rng, 300);
        if self.real_pacing > 0 && self.troubled == 0 && rng.chance(20) {
            self.requests = 8000;
        }
    }

    /// Several engines on each IoThread.
    pub(super) fn draw_mix(&mut self, rng: &mut Rng) {
        self.mix_engines = flag(rng, 300);
        if self.mix_engines > 0 {
            self.devices = self.devices.max(rng.pick(&[2, 2, 3]));
        }
    }

    /// A hung, a slow and a full disk beside healthy ones.
    pub(super) fn draw_trouble(&mut self, rng: &mut Rng) {
        self.troubled = flag(rng, 60);
        if self.troubled > 0 {
            self.devices = rng.pick(&[4, 5]);
            self.requests = self.requests.max(50);
            // A disk can keep its own share only if there is more than one op for each.
            self.depth = rng.pick(&[16, 64]);
            (self.rush, self.odd_shorts, self.stuck) = (0, 0, 0);
            self.io_threads = rng.pick(&[1, 1, 2]);
        }
    }

    /// Requests that wait for limits.
    pub(super) fn draw_limits(&mut self, rng: &mut Rng) {
        self.limits = some(rng, 200, &[50, 200, 1000]);
        if self.limits > 0 && self.scsi > 0 {
            // With these limits some command waits at most stops, which should leave it where they
            // can.
            self.limits = rng.pick(&[10, 20, 50]);
            self.stops = rng.pick(&[10, 40]);
            self.inflight = flag(rng, 700);
            // Time leaps while requests wait, so that two EAGAINs would be an EAGAIN for seconds.
            (self.eagain, self.eintr, self.stuck) = (0, 0, 0);
        }
    }

    /// virtio-scsi devices instead of virtio-blk ones.
    pub(super) fn draw_scsi(&mut self, rng: &mut Rng) {
        self.scsi = flag(rng, 300);
        if self.scsi == 0 {
            return;
        }
        // These options assume the queues and disks of virtio-blk.
        (self.rush, self.troubled, self.session, self.odd_shorts) = (0, 0, 0, 0);
        self.devices = self.devices.min(3);
        self.requests = self.requests.min(300);
        self.disks = rng.between(1, 3);
        self.swaps = some(rng, 500, &[1, 5, 20]);
        self.selects = some(rng, 400, &[1, 3]);
        self.reserves = some(rng, 400, &[30, 200]);
        self.functions = some(rng, 700, &[2, 10, 40]);
        self.events = rng.pick(&[0, 1, 2, 4]);
        self.no_events = flag(rng, 200);
        self.hotplugs = some(rng, 400, &[2, 6, 100]);
        self.resizes = some(rng, 300, &[1, 4]);
        self.writebacks = 0;
        if rng.chance(150) {
            // All commands want the same few blocks, some of them exclusively.
            (self.swaps, self.reads, self.writes) = (20, 20, 20);
            (self.blocks, self.request_blocks, self.disks, self.mixed) = (4, 2, 1, 0);
            (self.sync, self.latency_us) = (0, 100);
            // Nothing else keeps the commands from the blocks.
            (self.functions, self.hotplugs, self.resizes, self.reserves) = (0, 0, 0, 0);
            (self.no_overlap, self.read_only, self.block_4k, self.requests) = (0, 0, 0, 300);
            (self.eio, self.enospc, self.stuck, self.bads) = (0, 0, 0, 0);
        }
    }
}
