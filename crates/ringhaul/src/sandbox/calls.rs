//! System calls that no daemon needs, denied by seccomp (seccomp(2)).
//!
//! A filter looks at the number of a call and at arguments in registers. The kernel remembers calls
//! that a filter allows whatever their arguments are, so that calls of the data path cost nothing.

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use anyhow::{Context, Result};
use iomem::fits;
#[cfg(target_arch = "x86_64")]
use seccompiler::sock_filter;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use super::rules::Rules;

/// Calls by their numbers, with rules on their arguments; no rules: always.
pub(super) type Calls = BTreeMap<i64, Vec<SeccompRule>>;

/// A list of calls: their names, names that one architecture or C library alone has, and numbers.
macro_rules! numbers {
    ($($call:ident)+ $(; $key:ident = $value:literal: $($of_one:ident)+)*
     $(, $number:expr)*) => {
        &[
            $(syscalls::Sysno::$call as libc::c_long,)+
            $($(#[cfg($key = $value)] { syscalls::Sysno::$of_one as libc::c_long },)+)*
            $($number,)*
        ]
    };
}
pub(super) use numbers;

/// Calls that are denied whatever their arguments are: other programs and processes, other users,
/// owners and modes of files, mounts, the kernel itself.
const DENIED: &[libc::c_long] = numbers![
    execve execveat ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_open
    pidfd_getfd pidfd_send_signal bpf perf_event_open userfaultfd kexec_load init_module
    finit_module delete_module mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig
    fsmount fspick mount_setattr setns unshare swapon swapoff reboot sethostname setdomainname
    settimeofday clock_settime clock_adjtime adjtimex acct quotactl keyctl add_key request_key
    name_to_handle_at open_by_handle_at syslog vhangup fchmodat fchownat fchown setxattr lsetxattr
    fsetxattr removexattr lremovexattr fremovexattr utimensat setuid setgid setreuid setregid
    setresuid setresgid setfsuid setfsgid setgroups capset personality
    ; target_arch = "x86_64": fork vfork chmod chown lchown utime utimes futimesat iopl ioperm
    modify_ldt kexec_file_load
];

/// Newer calls for the same, which have these numbers on all architectures: `fchmodat2`,
/// `setxattrat`, `removexattrat`, `open_tree_attr` and `file_setattr`.
const DENIED_NEW: &[libc::c_long] = &[452, 463, 466, 467, 469];

/// Calls that signal the process in their first argument. The sandbox of files denies signals to
/// other processes from Linux 6.12 on.
const SIGNALS: [libc::c_long; 4] =
    [libc::SYS_kill, libc::SYS_tgkill, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo];

/// The mode that the daemon gives its files and sockets.
const PRIVATE_MODE: u32 = 0o600;

/// Numbers from here on are those of x32, another set of calls of this processor.
#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

/// The bits of a type of socket that are no flags.
const TYPE_MASK: u64 = 0xf;

/// Denies this thread, and all that it starts, the calls that a daemon with these rules does not
/// need. They fail with EPERM.
///
/// # Errors
///
/// When the kernel has no seccomp.
pub(super) fn deny(rules: &Rules) -> Result<()> {
    let denies = SeccompAction::Errno(fits(libc::EPERM, "an errno"));
    apply_to_x32(denies.clone())?;
    apply(denied(rules)?, denies)?;
    replace_clone3()
}

/// Applies `action` to all calls of x32. They come from the same architecture as others, so that a
/// filter of numbers alone does not see them.
#[cfg(target_arch = "x86_64")]
fn apply_to_x32(action: SeccompAction) -> Result<()> {
    let statement = |code: u32, k| sock_filter { code: fits(code, "a code"), jt: 0, jf: 0, k };
    let finish = |action: SeccompAction| statement(libc::BPF_RET | libc::BPF_K, action.into());
    let compare = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
    let program = [
        // The number of the call is the first field of the data.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        sock_filter { jf: 1, ..statement(compare, X32) },
        finish(action),
        finish(SeccompAction::Allow),
    ];
    apply_filter(&program).context("cannot restrict system calls of x32")
}

#[cfg(not(target_arch = "x86_64"))]
fn apply_to_x32(_: SeccompAction) -> Result<()> {
    Ok(())
}

/// Makes the C library start threads with `clone`: the arguments of `clone3` are in memory, where
/// no filter sees them.
fn replace_clone3() -> Result<()> {
    let clone3 = Calls::from([(libc::SYS_clone3, Vec::new())]);
    apply(clone3, SeccompAction::Errno(fits(libc::ENOSYS, "an errno")))
}

/// Denies this thread, and all that it starts, new rings of io_uring.
///
/// # Errors
///
/// When the kernel refuses.
pub(super) fn deny_rings() -> Result<()> {
    let setup = Calls::from([(libc::SYS_io_uring_setup, Vec::new())]);
    apply(setup, SeccompAction::Errno(fits(libc::EPERM, "an errno")))
}

/// Has the kernel log calls that [`deny`] would deny.
///
/// # Errors
///
/// When the kernel has no seccomp.
pub(super) fn log_denied(rules: &Rules) -> Result<()> {
    rustix::thread::set_no_new_privs(true).context("cannot give up new privileges")?;
    apply_to_x32(SeccompAction::Log)?;
    apply(denied(rules)?, SeccompAction::Log)
}

/// Calls that the process is denied; without rules on their arguments, always.
pub(super) fn denied(rules: &Rules) -> Result<Calls> {
    let mut calls: Calls = DENIED.iter().chain(DENIED_NEW).map(|nr| (*nr, Vec::new())).collect();
    // Threads, but no processes.
    calls.insert(libc::SYS_clone, vec![rule(0, masked(libc::CLONE_THREAD), 0)?]);
    calls.insert(libc::SYS_prlimit64, vec![rule(0, SeccompCmpOp::Ne, 0)?]);
    // Typed characters for a terminal.
    let typed = [libc::TIOCSTI, libc::TIOCLINUX];
    let typed = typed.map(|command| rule(1, SeccompCmpOp::Eq, command));
    calls.insert(libc::SYS_ioctl, typed.into_iter().collect::<Result<_>>()?);
    if !rules.may_connect() {
        calls.insert(libc::SYS_connect, Vec::new());
    }
    for call in SIGNALS {
        calls.insert(call, vec![rule(0, SeccompCmpOp::Ne, std::process::id())?]);
    }
    // The C library musl ends a process by it.
    #[cfg(not(target_env = "musl"))]
    calls.insert(libc::SYS_tkill, Vec::new());
    if !rules.has_libraries {
        calls.insert(libc::SYS_fchmod, vec![rule(1, SeccompCmpOp::Ne, PRIVATE_MODE)?]);
    }
    calls.insert(libc::SYS_socket, denied_sockets(rules)?);
    if rules.has_network() {
        // They connect, and Landlock does not look at all of them.
        let fast_open = u64::from(libc::MSG_FASTOPEN.cast_unsigned());
        let flag = SeccompCmpOp::MaskedEq(fast_open);
        for (call, flags) in
            [(libc::SYS_sendto, 3), (libc::SYS_sendmsg, 2), (libc::SYS_sendmmsg, 3)]
        {
            calls.insert(call, vec![rule(flags, flag.clone(), fast_open)?]);
        }
    }
    Ok(calls)
}

/// Sockets that a daemon with these rules does not need.
fn denied_sockets(rules: &Rules) -> Result<Vec<SeccompRule>> {
    let not_of = |families: &[libc::c_int]| -> Result<Vec<SeccompCondition>> {
        families.iter().map(|family| condition(0, SeccompCmpOp::Ne, *family)).collect()
    };
    let (unix, is_ip) = (libc::AF_UNIX, [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6]);
    if !rules.has_network() {
        return Ok(vec![SeccompRule::new(not_of(&[unix])?)?]);
    }
    if rules.connects_to_network() {
        // The C library asks the kernel for addresses of this machine.
        let families = [&is_ip[..], &[libc::AF_NETLINK]].concat();
        return Ok(vec![SeccompRule::new(not_of(&families)?)?]);
    }
    // The metrics server listens over TCP.
    let stream = u64::from(libc::SOCK_STREAM.cast_unsigned());
    let others = (0..=TYPE_MASK).filter(|kind| *kind != stream);
    let other_kinds = others.map(|kind| {
        let kind = condition(1, SeccompCmpOp::MaskedEq(TYPE_MASK), kind)?;
        Ok(SeccompRule::new([not_of(&[unix])?, vec![kind]].concat())?)
    });
    let families = SeccompRule::new(not_of(&is_ip)?)?;
    other_kinds.chain([Ok(families)]).collect()
}

/// Compares these bits.
fn masked(bits: libc::c_int) -> SeccompCmpOp {
    SeccompCmpOp::MaskedEq(u64::from(bits.cast_unsigned()))
}

/// A rule about the argument with this index.
fn rule(
    argument: u8,
    compare: SeccompCmpOp,
    value: impl TryInto<u64, Error: Into<anyhow::Error>>,
) -> Result<SeccompRule> {
    Ok(SeccompRule::new(vec![condition(argument, compare, value)?])?)
}

fn condition(
    argument: u8,
    compare: SeccompCmpOp,
    value: impl TryInto<u64, Error: Into<anyhow::Error>>,
) -> Result<SeccompCondition> {
    let value = value.try_into().map_err(Into::into)?;
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value)?)
}

/// Calls of the helper. Paths of sockets may be relative (`getcwd`).
const OF_HELPER: &[libc::c_long] = numbers![
    brk clone3 close connect exit exit_group fcntl fstat futex getcwd getdents64 getsockopt gettid
    mprotect prctl rseq rt_sigaction rt_sigprocmask sched_getaffinity set_robust_list sigaltstack
    getrandom lseek madvise mmap mremap munmap read readlinkat recvfrom restart_syscall rt_sigreturn
    seccomp sendmsg statx
    ; target_arch = "x86_64": readlink
    , libc::SYS_newfstatat
];

/// Allows this process the calls of the helper alone: it opens files for reading, writes to none,
/// and executes nothing.
///
/// # Errors
///
/// When the kernel has no seccomp.
pub(super) fn confine_helper() -> Result<()> {
    let mut calls: Calls = OF_HELPER.iter().map(|nr| (*nr, Vec::new())).collect();
    let writes = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC;
    calls.insert(libc::SYS_openat, vec![rule(2, masked(writes), libc::O_RDONLY)?]);
    calls.insert(libc::SYS_clone, vec![rule(0, masked(libc::CLONE_THREAD), libc::CLONE_THREAD)?]);
    calls.insert(libc::SYS_socket, vec![rule(0, SeccompCmpOp::Eq, libc::AF_UNIX)?]);
    replace_clone3()?;
    let denied = SeccompAction::Errno(fits(libc::EPERM, "an errno"));
    install(calls, denied, SeccompAction::Allow)
}

/// Applies `action` to these calls, and allows all others.
pub(super) fn apply(calls: Calls, action: SeccompAction) -> Result<()> {
    install(calls, SeccompAction::Allow, action)
}

fn install(calls: Calls, otherwise: SeccompAction, listed: SeccompAction) -> Result<()> {
    let program = program(calls, otherwise, listed)?;
    apply_filter(&program).context("cannot restrict system calls")
}

fn program(calls: Calls, otherwise: SeccompAction, listed: SeccompAction) -> Result<BpfProgram> {
    let machine: TargetArch =
        ARCH.try_into().context("this processor has no table of system calls")?;
    Ok(SeccompFilter::new(calls, otherwise, listed, machine)?.try_into()?)
}

/// The filter that allows these calls alone, and no executable memory. All others have `action`.
pub(super) fn only(
    listed: impl Iterator<Item = libc::c_long>,
    action: SeccompAction,
) -> Result<BpfProgram> {
    let mut calls: Calls = listed.map(|call| (call, vec![])).collect();
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        calls.insert(call, vec![rule(2, masked(libc::PROT_EXEC), 0)?]);
    }
    program(calls, action, SeccompAction::Allow)
}

#[cfg(test)]
mod tests {
    use rustix::fs::OFlags;
    use rustix::io::Errno;
    use rustix::net::{AddressFamily as Family, SocketType as Type, socket};
    use rustix::process::{getpid, getppid, test_kill_process};

    use super::*;

    /// Runs `test` on a thread with the filter for these rules, without the sandbox of files.
    fn with_filter(rules: Rules, test: impl FnOnce() + Send) {
        let run = || {
            deny(&rules).unwrap();
            test();
        };
        std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
    }

    /// A daemon would take itself for confined.
    #[test]
    fn a_filter_that_the_kernel_refuses_is_an_error() {
        let refuse = SeccompAction::Errno(fits(libc::EPERM, "an errno"));
        let run = || {
            apply(Calls::from([(libc::SYS_seccomp, Vec::new())]), refuse.clone()).unwrap();
            let calls = Calls::from([(libc::SYS_times, Vec::new())]);
            let error = format!("{:#}", apply(calls, refuse.clone()).unwrap_err());
            assert!(error.starts_with("cannot restrict system calls"), "{error}");
            deny_rings().unwrap_err();
            deny(&Rules::default()).unwrap_err();
        };
        std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
    }

    /// The calls of a list alone get the action.
    #[test]
    fn listed_calls_get_the_action_and_all_others_run() {
        let run = || {
            let refuse = SeccompAction::Errno(fits(libc::ENOTTY, "an errno"));
            apply(Calls::from([(libc::SYS_kill, Vec::new())]), refuse).unwrap();
            assert_eq!(test_kill_process(getpid()), Err(Errno::NOTTY));
            assert!(socket(Family::UNIX, Type::STREAM, None).is_ok());
        };
        std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
    }

    #[test]
    fn signals_go_to_the_own_process_alone() {
        with_filter(Rules::default(), || {
            assert_eq!(test_kill_process(getpid()), Ok(()));
            assert_eq!(test_kill_process(getppid().unwrap()), Err(Errno::PERM));
        });
    }

    #[test]
    fn files_become_private_alone() {
        let file = tempfile::tempfile().unwrap();
        with_filter(Rules::default(), || {
            assert_eq!(rustix::fs::fchmod(&file, 0o600.into()), Ok(()));
            for mode in [0o666, 0o4600, 0o400] {
                assert_eq!(rustix::fs::fchmod(&file, mode.into()), Err(Errno::PERM), "{mode:o}");
            }
        });
    }

    /// Such a message opens a connection to any server.
    #[test]
    fn no_message_opens_a_connection() {
        use rustix::net::{
            MMsgHdr, SendAncillaryBuffer, SendFlags, SocketFlags, send, sendmmsg, sendmsg,
            socketpair,
        };
        let (ours, _theirs) =
            socketpair(Family::UNIX, Type::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let opens = SendFlags::from_bits_retain(libc::MSG_FASTOPEN.cast_unsigned());
        let mut rules = Rules::default();
        rules.server(10809);
        with_filter(rules, || {
            let slices = [std::io::IoSlice::new(b"x")];
            let none = &mut SendAncillaryBuffer::default();
            for (flags, expected) in [(SendFlags::empty(), Ok(1)), (opens, Err(Errno::PERM))] {
                assert_eq!(send(&ours, b"x", flags), expected);
                assert_eq!(sendmsg(&ours, &slices, none, flags), expected);
                let mut all = [MMsgHdr::new(&slices, none)];
                assert_eq!(sendmmsg(&ours, &mut all, flags), expected);
            }
        });
    }

    /// The helper reads with more rights than the daemon.
    #[test]
    fn the_helper_opens_files_only_to_read_them() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "text").unwrap();
        let open =
            |flags| rustix::fs::openat(rustix::fs::CWD, file.path(), flags, 0o600.into()).map(drop);
        let opened = || {
            confine_helper().unwrap();
            let read = OFlags::RDONLY;
            let create = read | OFlags::CREATE;
            [read, read | OFlags::TRUNC, create, OFlags::WRONLY, OFlags::RDWR].map(open)
        };
        let opened = std::thread::scope(|scope| scope.spawn(opened).join()).unwrap();
        let denied = Err(Errno::PERM);
        assert_eq!(opened, [Ok(()), denied, denied, denied, denied]);
        assert_eq!(std::fs::read(&file).unwrap(), b"text");
    }

    #[test]
    fn sockets_are_of_the_families_and_types_that_the_rules_need() {
        let (mut metrics, mut network) = (Rules::default(), Rules::default());
        metrics.listen(9750);
        network.server(10809);
        let all = [
            (Family::UNIX, Type::DGRAM, [true, true, true]),
            (Family::INET, Type::STREAM, [false, true, true]),
            (Family::INET6, Type::STREAM, [false, true, true]),
            (Family::INET, Type::DGRAM, [false, false, true]),
            (Family::NETLINK, Type::RAW, [false, false, true]),
            (Family::from_raw(38), Type::SEQPACKET, [false, false, false]),
            (Family::VSOCK, Type::STREAM, [false, false, false]),
        ];
        for (index, rules) in [Rules::default(), metrics, network].into_iter().enumerate() {
            with_filter(rules, || {
                for (family, kind, permitted) in all {
                    let made = socket(family, kind, None).map(drop);
                    let is_permitted = made != Err(Errno::PERM);
                    assert_eq!(is_permitted, permitted[index], "{family:?} {kind:?} {made:?}");
                }
            });
        }
    }
}
