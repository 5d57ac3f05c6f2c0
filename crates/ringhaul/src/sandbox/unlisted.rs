//! Calls that the table of a thread does not list.
//!
//! The kernel makes no such call, and raises SIGSYS in its place. The handler of the signal lets
//! the call fail with EPERM, so that the thread goes on, and writes a record to a pipe. A thread
//! reads the records and has a line in the log for each call of each thread.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::{Context, Result};
use blockio::executor::{Lock, start_thread};
use rustix::pipe::{PipeFlags, pipe_with};
use seccompiler::SeccompAction;
use syscalls::Sysno;

use crate::log;

/// The consequence of an unlisted call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reaction {
    /// It succeeds, with a line in the kernel's log.
    KernelLog,
    /// It fails, with a line in the log.
    Deny,
    /// The process ends after that line.
    End,
}

impl Reaction {
    /// The action of the filters.
    pub(super) fn action(self) -> SeccompAction {
        match self {
            Self::KernelLog => SeccompAction::Log,
            Self::Deny | Self::End => SeccompAction::Trap,
        }
    }
}

/// Status of a process that an unlisted call has ended.
const EXIT_UNLISTED: i32 = 5;

/// The longest time, in milliseconds, that the line of the last call may take.
const LAST_LINE_MAX_MS: c_int = 5000;

/// The most lines in the log of a process.
const LINES_MAX: usize = 256;

/// Bytes of the name of a thread in the kernel.
const NAME_BYTES: usize = 16;
/// Bytes of a record: the number of the call, and the name of the thread.
const RECORD_BYTES: usize = size_of::<c_int>() + NAME_BYTES;

/// The end of the pipe to which the handler writes.
static RECORDS: AtomicI32 = AtomicI32::new(-1);
/// The other end, until a thread reads from it.
static READ_END: Lock<Option<File>> = Lock::new(None);
/// True if the process ends.
static ENDS: AtomicI32 = AtomicI32::new(0);

/// Takes over SIGSYS, before the first filter that raises it.
///
/// # Errors
///
/// When the kernel refuses, or this processor has no handler.
pub(super) fn catch(reaction: Reaction) -> Result<()> {
    if reaction == Reaction::KernelLog {
        return Ok(());
    }
    if !HAS_REGISTERS {
        anyhow::bail!("this processor has no tables of system calls for each thread");
    }
    let (read_end, write_end) =
        pipe_with(PipeFlags::CLOEXEC).context("cannot make a pipe for denied system calls")?;
    rustix::io::ioctl_fionbio(&write_end, true).context("cannot prepare a pipe")?;
    *READ_END.lock() = Some(read_end.into());
    ENDS.store(c_int::from(reaction == Reaction::End), Ordering::Relaxed);
    RECORDS.store(write_end.into_raw_fd(), Ordering::Relaxed);
    install().context("cannot take over SIGSYS")
}

fn install() -> io::Result<()> {
    // SAFETY: all zeroes are a valid action and a valid set. The handler takes the arguments that
    // SA_SIGINFO promises, and keeps to the rules for handlers, see `on_sigsys`. A blocked SIGSYS
    // would end the process, so that this thread and all later ones do not block it.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigsys;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESTART;
        libc::sigemptyset(&raw mut action.sa_mask);
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGSYS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The reason of a signal that a filter raises (siginfo.h).
const SYS_SECCOMP: c_int = 1;

/// The handler. It makes only system calls that all tables list, and touches only atomics, errno
/// and its arguments.
extern "C" fn on_sigsys(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: `errno` is the thread's own, and the interrupted code must find it unchanged. The
    // kernel passes a valid `info`, and registers that it restores at the return.
    unsafe {
        // Another process may send the signal, too.
        if (*info).si_code != SYS_SECCOMP {
            return;
        }
        let call = deny(&mut *context.cast::<libc::ucontext_t>());
        // A panic opens the program, to name functions. Its own report must not be lost.
        if log::is_panicking() {
            return;
        }
        let errno = *libc::__errno_location();
        let mut record = [0; RECORD_BYTES];
        let (number, name) = record.split_at_mut(size_of::<c_int>());
        number.copy_from_slice(&call.to_ne_bytes());
        libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr());
        // A full pipe has records that the log has not seen. This one can wait for the next call.
        libc::write(RECORDS.load(Ordering::Relaxed), record.as_ptr().cast(), RECORD_BYTES);
        if ENDS.load(Ordering::Relaxed) != 0 {
            // The thread that reads the record ends the process.
            libc::poll(std::ptr::null_mut(), 0, LAST_LINE_MAX_MS);
            libc::_exit(EXIT_UNLISTED);
        }
        *libc::__errno_location() = errno;
    }
}

/// True if [`deny`] knows the registers of this processor.
const HAS_REGISTERS: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// Gives the interrupted call the result EPERM. Returns its number.
#[cfg(target_arch = "x86_64")]
fn deny(context: &mut libc::ucontext_t) -> c_int {
    let register = usize::try_from(libc::REG_RAX).unwrap_or(0);
    let result = &mut context.uc_mcontext.gregs[register];
    let call = std::mem::replace(result, -i64::from(libc::EPERM));
    c_int::try_from(call).unwrap_or(-1)
}

/// Gives the interrupted call the result EPERM. Returns its number.
#[cfg(target_arch = "aarch64")]
fn deny(context: &mut libc::ucontext_t) -> c_int {
    let registers = &mut context.uc_mcontext.regs;
    registers[0] = (-i64::from(libc::EPERM)).cast_unsigned();
    c_int::try_from(registers[8]).unwrap_or(-1)
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn deny(_: &mut libc::ucontext_t) -> c_int {
    -1
}

/// Starts the thread that reports calls.
///
/// # Errors
///
/// When the kernel has no thread left.
pub(super) fn start_report(reaction: Reaction) -> io::Result<()> {
    let Some(records) = READ_END.lock().take() else { return Ok(()) };
    start_thread("ringhaul-denied", move || report(records, reaction)).map(drop)
}

fn report(mut records: File, reaction: Reaction) {
    let mut known = BTreeSet::new();
    let mut record = [0; RECORD_BYTES];
    // A record is written in one piece.
    while records.read_exact(&mut record).is_ok() {
        if known.len() >= LINES_MAX || !known.insert(record) {
            continue;
        }
        let (number, name) = record.split_at(size_of::<c_int>());
        let number = number.try_into().map_or(-1, c_int::from_ne_bytes);
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let (call, thread) = (name_of(number), String::from_utf8_lossy(name));
        if reaction == Reaction::End {
            tracing::error!(
                "the thread {thread} made the system call {call}, which it does not need: the \
                 daemon ends at once, because of --sandbox strict"
            );
            log::flush();
            std::process::exit(EXIT_UNLISTED);
        }
        tracing::warn!(
            "denied the thread {thread} the system call {call}, which it does not need (EPERM); \
             further ones of this thread are not logged; please report this line as a bug, unless \
             you suspect an intrusion"
        );
    }
}

fn name_of(call: c_int) -> String {
    let known = usize::try_from(call).ok().and_then(Sysno::new);
    known.map_or_else(|| call.to_string(), |known| known.name().to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::testing::LogCapture;

    fn record(call: c_int, thread: &str) -> [u8; RECORD_BYTES] {
        let mut record = [0; RECORD_BYTES];
        let (number, name) = record.split_at_mut(size_of::<c_int>());
        number.copy_from_slice(&call.to_ne_bytes());
        name[..thread.len()].copy_from_slice(thread.as_bytes());
        record
    }

    /// The lines about these records.
    fn report_of(records: &[[u8; RECORD_BYTES]]) -> Vec<String> {
        let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let mut write_end = File::from(write_end);
        std::thread::scope(|scope| {
            scope.spawn(move || records.iter().for_each(|it| write_end.write_all(it).unwrap()));
            LogCapture::lines_of(|| report(read_end.into(), Reaction::Deny))
        })
    }

    /// A thread that repeats its call would fill the log.
    #[test]
    fn each_call_of_a_thread_has_one_line() {
        let [times, getppid] =
            [libc::SYS_times, libc::SYS_getppid].map(|call| iomem::fits(call, "a number"));
        let records = [
            record(times, "iothread-0"),
            record(times, "iothread-0"),
            record(times, "iothread-1"),
            record(getppid, "iothread-0"),
            record(times, "iothread-0"),
            record(-7, "a-name-of-16-let"),
        ];
        let lines = report_of(&records);
        let expected = [
            ("iothread-0", "times"),
            ("iothread-1", "times"),
            ("iothread-0", "getppid"),
            ("a-name-of-16-let", "-7"),
        ];
        assert_eq!(lines.len(), expected.len(), "{lines:?}");
        for (line, (thread, call)) in lines.iter().zip(expected) {
            let words = format!("denied the thread {thread} the system call {call}, which");
            assert!(line.contains(&words), "{line}");
        }
    }

    #[test]
    fn a_process_logs_a_bounded_number_of_calls() {
        let records: Vec<_> = (0..1000).map(|call| record(call, "iothread-0")).collect();
        assert_eq!(report_of(&records).len(), LINES_MAX);
    }
}
