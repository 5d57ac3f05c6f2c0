//! The attempts.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::path::Path;

use io_uring::{IoUring, opcode, types};
use rustix::net::{RecvFlags, SendFlags, SocketType, sockopt};

/// The surroundings of an attempt.
pub(crate) struct Scene<'a> {
    /// A folder with `mine/disk`, the daemon's disk, `mine/neighbour`, `others/disk`, and the
    /// socket `others/server`.
    pub(crate) folder: &'a Path,
    /// A port of this machine at which a server listens.
    pub(crate) port: u16,
}

/// An attempt. It fails with the errno of the kernel.
pub(crate) type Attempt = fn(&Scene<'_>) -> io::Result<()>;

/// A signal that waits in the process which starts all attempts.
pub(crate) const WAITING_SIGNAL: libc::c_int = libc::SIGURG;

/// The command that chooses the signal of a file (fcntl(2)).
const F_SETSIG: libc::c_int = 10;

/// All attempts by their names.
pub(crate) const ATTEMPTS: &[(&str, Attempt)] = &[
    ("read /etc/passwd", |_| File::open("/etc/passwd").map(drop)),
    ("read a neighbour's disk", |scene| File::open(scene.folder.join("others/disk")).map(drop)),
    ("read a disk beside its own", |scene| {
        File::open(scene.folder.join("mine/neighbour")).map(drop)
    }),
    ("write to a disk beside its own", |scene| {
        File::options().write(true).open(scene.folder.join("mine/neighbour")).map(drop)
    }),
    ("make a file beside its disk", |scene| {
        File::create_new(scene.folder.join("mine/new")).map(drop)
    }),
    ("give a neighbour's disk another mode", |scene| {
        let mode = std::fs::Permissions::from_mode(0o666);
        std::fs::set_permissions(scene.folder.join("others/disk"), mode)
    }),
    ("list a folder", |scene| std::fs::read_dir(scene.folder).map(drop)),
    ("read the memory of another process", |_| {
        File::open(format!("/proc/{}/mem", std::os::unix::process::parent_id())).map(drop)
    }),
    ("find the files of another process", |_| {
        let parent = std::os::unix::process::parent_id();
        std::fs::read_link(format!("/proc/{parent}/fd/0")).map(drop)
    }),
    ("trace another process", |_| {
        let parent = libc::pid_t::try_from(std::os::unix::process::parent_id()).unwrap();
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: attaches to a process, and passes no memory.
        check(unsafe { libc::ptrace(libc::PTRACE_SEIZE, parent, none, none) })
    }),
    ("signal another process", |_| {
        let parent = libc::pid_t::try_from(std::os::unix::process::parent_id()).unwrap();
        // SAFETY: signal 0 only checks the permission.
        check(unsafe { libc::kill(parent, 0) }.into())
    }),
    ("have the kernel signal another process", |_| {
        let parent = libc::pid_t::try_from(std::os::unix::process::parent_id()).unwrap();
        let (ours, theirs) = UnixStream::pair()?;
        for (command, value) in
            [(libc::F_SETOWN, parent), (F_SETSIG, WAITING_SIGNAL), (libc::F_SETFL, libc::O_ASYNC)]
        {
            // SAFETY: none of these commands has a pointer.
            check(unsafe { libc::fcntl(ours.as_raw_fd(), command, value) }.into())?;
        }
        // The kernel sends the signal before this returns.
        (&theirs).write_all(b"x")?;
        let status = std::fs::read_to_string(format!("/proc/{parent}/status"))?;
        let waiting = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
        let waiting = waiting.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        match waiting.is_some_and(|mask| mask & 1 << (WAITING_SIGNAL - 1) != 0) {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::EPERM)),
        }
    }),
    ("execute a program", |_| {
        // A program that runs takes the place of this one, so its status is that of success.
        let program = [c"/bin/sh", c"-c", c"exit 10"].map(std::ffi::CStr::as_ptr);
        let arguments = [program[0], program[1], program[2], std::ptr::null()];
        // SAFETY: the list and its texts are constants, and the list ends with a null.
        check(unsafe { libc::execv(program[0], arguments.as_ptr()) }.into())
    }),
    ("set a limit of another process", |_| {
        let parent = std::os::unix::process::parent_id();
        let none = std::ptr::null::<libc::c_void>();
        let call = libc::SYS_prlimit64;
        // SAFETY: without pointers, the call only checks its permission.
        check(unsafe { libc::syscall(call, parent, libc::RLIMIT_NOFILE, none, none) })
    }),
    ("type into a terminal", |scene| {
        let file = File::open(scene.folder.join("mine/disk"))?;
        // SAFETY: the file is no terminal, so that the kernel reads nothing.
        check_command(unsafe { libc::ioctl(file.as_raw_fd(), libc::TIOCSTI, c"x".as_ptr()) })
    }),
    ("paste into a terminal", |scene| {
        let file = File::open(scene.folder.join("mine/disk"))?;
        // SAFETY: as above.
        check_command(unsafe { libc::ioctl(file.as_raw_fd(), libc::TIOCLINUX, c"x".as_ptr()) })
    }),
    ("send to an abstract socket", |scene| {
        let address = SocketAddr::from_abstract_name(scene.name())?;
        UnixDatagram::unbound()?.send_to_addr(b"x", &address).map(drop)
    }),
    ("have the helper connect to a socket", |scene| {
        let path = scene.folder.join("others/server");
        let request = [b"numbs", path.as_os_str().as_bytes()].concat();
        // Without a sandbox there is no helper.
        let Some(helper) = helper() else { return Ok(()) };
        rustix::net::send(&helper, &request, SendFlags::empty())?;
        let mut answer = [0; 64];
        let (_, bytes) = rustix::net::recv(&helper, &mut answer, RecvFlags::empty())?;
        match answer[..bytes] {
            [_, _, _, _, b'f', ref code @ ..] => {
                let code = code.try_into().map_or(libc::EIO, i32::from_ne_bytes);
                Err(io::Error::from_raw_os_error(code))
            }
            _ => Ok(()),
        }
    }),
    ("start a process", |_| {
        // SAFETY: the child ends at once.
        match unsafe { libc::fork() } {
            // SAFETY: as above.
            0 => unsafe { libc::_exit(0) },
            child => check(child.into()),
        }
    }),
    ("connect to a socket", |scene| {
        UnixStream::connect(scene.folder.join("others/server")).map(drop)
    }),
    ("connect over TCP", |scene| TcpStream::connect(("127.0.0.1", scene.port)).map(drop)),
    ("listen on TCP", |_| std::net::TcpListener::bind("127.0.0.1:0").map(drop)),
    ("send a packet", |_| std::net::UdpSocket::bind("127.0.0.1:0").map(drop)),
    ("become another user", |_| {
        // SAFETY: changes the user of this thread only, which ends soon.
        check(unsafe { libc::syscall(libc::SYS_setresuid, -1_i64, 0_i64, -1_i64) })
    }),
    #[cfg(target_arch = "x86_64")]
    ("make a call of x32", |_| {
        // SAFETY: a call without arguments.
        let result = unsafe { libc::syscall(libc::SYS_getppid | 0x4000_0000) };
        match check(result) {
            // Most kernels are built without these calls.
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
            other => other,
        }
    }),
    ("give a file an attribute", |scene| {
        let file = File::open(scene.folder.join("mine/disk"))?;
        let none = std::ptr::null::<libc::c_void>();
        // SAFETY: `setxattrat` with null pointers fails before it does anything.
        let result = unsafe { libc::syscall(463, file.as_raw_fd(), none, 0, none, none, 16_usize) };
        match check(result) {
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EFAULT | libc::EINVAL | libc::ENOSYS)
                ) =>
            {
                Ok(())
            }
            other => other,
        }
    }),
    ("enter a namespace", |_| {
        // SAFETY: makes a namespace for this thread, which ends soon.
        check(unsafe { libc::unshare(libc::CLONE_NEWNET) }.into())
    }),
    ("open a file through io_uring", |_| {
        let mut ring = IoUring::new(1)?;
        let path = CString::new("/etc/passwd")?;
        let open = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path.as_ptr());
        run(&mut ring, &open.flags(libc::O_RDONLY).build())
    }),
    ("connect through io_uring", |_| {
        let mut ring = IoUring::new(1)?;
        run(&mut ring, &opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build())
    }),
    ("look at the events of the kernel", |_| {
        let file = File::open("/proc/self/status")?;
        // SAFETY: a call with a wrong pointer fails before it does anything.
        let result = unsafe {
            libc::syscall(libc::SYS_perf_event_open, 0_usize, 0, -1, file.as_raw_fd(), 0)
        };
        match check(result) {
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Ok(()),
            other => other,
        }
    }),
];

/// Lets [`WAITING_SIGNAL`] wait. The children of this process receive it as usual.
pub(crate) fn hold_signal() {
    let mut signals = std::mem::MaybeUninit::uninit();
    // SAFETY: the set is written before it is used, and the old set of this thread is not wanted.
    let result = unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        libc::sigaddset(signals.as_mut_ptr(), WAITING_SIGNAL);
        libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut())
    };
    assert_eq!(result, 0);
}

impl Scene<'_> {
    /// The name of an abstract socket that receives.
    pub(crate) fn name(&self) -> Vec<u8> {
        self.folder.as_os_str().as_bytes().to_vec()
    }
}

/// The daemon's end of the connection to its helper.
fn helper() -> Option<OwnedFd> {
    let numbers = std::fs::read_dir("/proc/self/fd").ok()?.flatten();
    let mut numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.find_map(|number: i32| {
        // SAFETY: an open descriptor of this process is borrowed until the copy is made.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let is_helper = sockopt::socket_type(fd).is_ok_and(|kind| kind == SocketType::SEQPACKET);
        if is_helper { fd.try_clone_to_owned().ok() } else { None }
    })
}

/// The result of a command for a device, to a file that knows none.
fn check_command(result: libc::c_int) -> io::Result<()> {
    match check(result.into()) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => Ok(()),
        other => other,
    }
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Runs an operation of a ring.
fn run(ring: &mut IoUring, entry: &io_uring::squeue::Entry) -> io::Result<()> {
    // SAFETY: the caller's path lives until the completion, for which the next line waits.
    unsafe { ring.submission().push(entry) }.unwrap();
    ring.submit_and_wait(1)?;
    match ring.completion().next().unwrap().result() {
        result if result < 0 => Err(io::Error::from_raw_os_error(-result)),
        _ => Ok(()),
    }
}
