//! System calls that no daemon needs, denied by seccomp (seccomp(2)).
//!
//! A filter looks at the number of a call and at arguments in registers. The kernel remembers calls
//! that a filter allows whatever their arguments are, so that calls of the data path cost nothing.

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use anyhow::{Context, Result};
use iomem::fits;
use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};

use super::rules::Rules;

/// Calls by their numbers, with rules on their arguments; no rules: always.
type Calls = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls that are denied whatever their arguments are: other programs and processes, other users,
/// owners and modes of files, mounts, the kernel itself.
const DENIED: &[libc::c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_kexec_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_reboot,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_fchown,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    libc::SYS_utimensat,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_capset,
    libc::SYS_personality,
];

/// Older calls for the same, which new architectures do not have.
#[cfg(target_arch = "x86_64")]
const DENIED_OLD: &[libc::c_long] = &[
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_kexec_file_load,
];
#[cfg(not(target_arch = "x86_64"))]
const DENIED_OLD: &[libc::c_long] = &[];

/// `fchmodat2`, which has this number on all architectures.
const FCHMODAT2: libc::c_long = 452;

/// Denies this thread, and all that it starts, the calls that a daemon with these rules does not
/// need. They fail with EPERM.
///
/// # Errors
///
/// When the kernel has no seccomp.
pub(super) fn deny(rules: &Rules) -> Result<()> {
    apply(denied(rules)?, SeccompAction::Errno(fits(libc::EPERM, "an errno")))?;
    replace_clone3()
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
    apply(denied(rules)?, SeccompAction::Log)
}

fn denied(rules: &Rules) -> Result<Calls> {
    let mut calls: Calls =
        DENIED.iter().chain(DENIED_OLD).chain(&[FCHMODAT2]).map(|nr| (*nr, Vec::new())).collect();
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
    if !rules.has_network() {
        let unix = u64::try_from(libc::AF_UNIX)?;
        calls.insert(libc::SYS_socket, vec![rule(0, SeccompCmpOp::Ne, unix)?]);
    }
    Ok(calls)
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
    let value = value.try_into().map_err(Into::into)?;
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

/// Calls of the helper.
const OF_HELPER: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_clone3,
    libc::SYS_close,
    libc::SYS_connect,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getdents64,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_mprotect,
    libc::SYS_prctl,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sched_getaffinity,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_getrandom,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_newfstatat,
    libc::SYS_read,
    libc::SYS_readlinkat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    libc::SYS_recvfrom,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigreturn,
    libc::SYS_seccomp,
    libc::SYS_sendmsg,
    libc::SYS_statx,
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
fn apply(calls: Calls, action: SeccompAction) -> Result<()> {
    install(calls, SeccompAction::Allow, action)
}

fn install(calls: Calls, otherwise: SeccompAction, listed: SeccompAction) -> Result<()> {
    let machine: TargetArch =
        ARCH.try_into().context("this processor has no table of system calls")?;
    let filter = SeccompFilter::new(calls, otherwise, listed, machine)?;
    let program: seccompiler::BpfProgram = filter.try_into()?;
    apply_filter(&program).context("cannot restrict system calls")
}
