//! Builds the image of test guests: a kernel, and an initramfs with the tools of this machine.
//!
//! The result is kept under the target directory. Its key is a hash of all inputs except QEMU's
//! kernel: asking apt for the kernel takes a second, and a guest that stays the same between two
//! test runs is no disadvantage. A new image is made after `cargo clean`, on request, and after any
//! change of a tool, its libraries or the init script.

use std::collections::BTreeSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::BufWriter;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use ringhaul_tools::process::output;
use ringhaul_tools::workspace;
use rustix::fs::{FlockOperation, flock};

use super::cpio::Archive;
use super::kernel::{self, Kernel};

/// The version of the image's layout. Increase it after a change of the layout that changes no
/// input.
const LAYOUT: u32 = 4;

/// The first process of the guest.
const INIT: &str = include_str!("init");

/// A program that changes files at random, and compares them with a model.
const TREE_STRESS: &str = include_str!("../bin/tree_stress.rs");

/// Tools beside busybox, and the Debian packages that hold them.
const TOOLS: [(&str, &str); 27] = [
    ("fio", "fio"),
    ("mke2fs", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("blkdiscard", "util-linux"),
    ("iscsi-test-cu", "libiscsi-bin"),
    ("lsblk", "util-linux"),
    ("md5sum", "coreutils"),
    ("sg_compare_and_write", "sg3-utils"),
    ("sg_get_lba_status", "sg3-utils"),
    ("sg_inq", "sg3-utils"),
    ("sg_logs", "sg3-utils"),
    ("sg_luns", "sg3-utils"),
    ("sg_modes", "sg3-utils"),
    ("sg_opcodes", "sg3-utils"),
    ("sg_persist", "sg3-utils"),
    ("sg_prevent", "sg3-utils"),
    ("sg_raw", "sg3-utils"),
    ("sg_readcap", "sg3-utils"),
    ("sg_requests", "sg3-utils"),
    ("sg_reset", "sg3-utils"),
    ("sg_start", "sg3-utils"),
    ("sg_sync", "sg3-utils"),
    ("sg_turs", "sg3-utils"),
    ("sg_unmap", "sg3-utils"),
    ("sg_verify", "sg3-utils"),
    ("sg_vpd", "sg3-utils"),
    ("sg_write_same", "sg3-utils"),
];

/// The package of the program with which udev names SCSI disks. Guests need that program alone.
/// Installing the package would replace the manager of this machine's device nodes.
const UDEV: &str = "udev";

/// Possible paths of that program in the package.
const SCSI_ID: [&str; 2] = ["usr/lib/udev/scsi_id", "lib/udev/scsi_id"];

/// The program of User Mode Linux.
const UML: (&str, &str) = ("linux.uml", "user-mode-linux");

/// The kernel's command line. A guest that panics reboots at once, which is noticed; a guest that
/// hangs is not.
pub const KERNEL_OPTIONS: &str = "console=ttyS0 loglevel=5 panic=-1 mitigations=off";

/// A further kernel option after a boot from a disk.
pub const BOOTED_FROM_DISK: &str = "booted-from-disk";

/// The size of a boot disk: kernel and initramfs, with room for a file system.
const BOOT_DISK_BYTES: u64 = 256 << 20;

/// The configuration without which mke2fs makes an ext4 without extents.
const MKE2FS_CONFIG: &str = "/etc/mke2fs.conf";

/// A kernel and an initramfs that QEMU can boot, or User Mode Linux with an initramfs.
#[derive(Clone, Debug)]
pub struct Image {
    /// The kernel's bzImage, or the program of User Mode Linux.
    pub kernel: PathBuf,
    /// The initramfs, uncompressed.
    pub initramfs: PathBuf,
    /// The kernel's package and version.
    pub kernel_version: String,
}

impl Image {
    /// Returns the image of this machine, after building it if there is none.
    ///
    /// # Errors
    /// If a tool is not installed (the error names its package), or the kernel cannot be fetched.
    pub fn prepare() -> Result<Self> {
        Self::prepare_from(Inputs::find)
    }

    /// Returns the image for User Mode Linux, after building it if there is none.
    ///
    /// # Errors
    /// If a tool or User Mode Linux is not installed.
    pub(super) fn prepare_uml() -> Result<Self> {
        Self::prepare_from(|| {
            let uml = Self::find_uml()?;
            Ok(Inputs { uml: Some(uml), ..Inputs::find()? })
        })
    }

    /// The program of User Mode Linux.
    ///
    /// # Errors
    /// If it is not installed.
    pub fn find_uml() -> Result<PathBuf> {
        find_program(UML.0, UML.1)
    }

    fn prepare_from(find: impl Fn() -> Result<Inputs>) -> Result<Self> {
        let _lock = lock()?;
        let inputs = find()?;
        let folder = guest_dir()?.join(format!("image-{:016x}", inputs.key()));
        match Self::open(&folder) {
            Some(image) => Ok(image),
            None => build(inputs, &folder),
        }
    }

    /// Builds the image again, with the newest kernel that apt knows.
    ///
    /// # Errors
    /// As for [`Image::prepare`].
    pub fn rebuild() -> Result<Self> {
        let _lock = lock()?;
        let inputs = Inputs::find()?;
        let folder = guest_dir()?.join(format!("image-{:016x}", inputs.key()));
        if folder.exists() {
            std::fs::remove_dir_all(&folder)
                .with_context(|| format!("removing the old image {}", folder.display()))?;
        }
        build(inputs, &folder)
    }

    /// Makes a disk at `path` with a boot loader, the kernel and the initramfs, for BIOS firmware.
    ///
    /// # Errors
    /// If a tool is not installed, or the disk cannot be made.
    pub fn make_boot_disk(&self, path: &Path) -> Result<()> {
        let making = || format!("making the disk {}", path.display());
        File::create_new(path)
            .and_then(|file| file.set_len(BOOT_DISK_BYTES))
            .with_context(making)?;
        output(Command::new(find_program("mkfs.fat", "dosfstools")?).args(["-F", "32"]).arg(path))
            .with_context(making)?;
        output(Command::new(find_program("syslinux", "syslinux")?).arg("--install").arg(path))
            .with_context(making)?;
        let loader = tempfile::NamedTempFile::new().context("making the loader's configuration")?;
        let text = format!(
            "DEFAULT guest\nLABEL guest\nKERNEL kernel\nINITRD initrd\n\
             APPEND {KERNEL_OPTIONS} {BOOTED_FROM_DISK}\n"
        );
        std::fs::write(loader.path(), text).context("writing the loader's configuration")?;
        for (file, name) in [
            (loader.path(), "::syslinux.cfg"),
            (&*self.kernel, "::kernel"),
            (&*self.initramfs, "::initrd"),
        ] {
            let mut copy = Command::new(find_program("mcopy", "mtools")?);
            output(copy.arg("-i").arg(path).arg(file).arg(name)).with_context(making)?;
        }
        Ok(())
    }

    fn open(folder: &Path) -> Option<Self> {
        let kernel_version = std::fs::read_to_string(folder.join("kernel-version")).ok()?;
        Some(Self {
            kernel: folder.join("vmlinuz"),
            initramfs: folder.join("initramfs.cpio"),
            kernel_version,
        })
    }
}

/// The folder of images and of properties of this machine.
///
/// # Errors
/// If the folder cannot be made.
pub(crate) fn guest_dir() -> Result<PathBuf> {
    let root = workspace::root();
    let target = match std::env::var_os("CARGO_TARGET_DIR") {
        Some(target) => root.join(target),
        None => root.join("target"),
    };
    let folder = target.join("guest");
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("making the folder {}", folder.display()))?;
    folder.canonicalize().with_context(|| format!("finding the folder {}", folder.display()))
}

/// Keeps other test processes from building, until it is dropped.
pub(crate) fn lock() -> Result<File> {
    let path = guest_dir()?.join("lock");
    let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    flock(&file, FlockOperation::LockExclusive)
        .with_context(|| format!("locking {}", path.display()))?;
    Ok(file)
}

/// The files of this machine that the initramfs contains.
struct Inputs {
    /// The kernel, if it is User Mode Linux.
    uml: Option<PathBuf>,
    busybox: PathBuf,
    tools: Vec<PathBuf>,
    libraries: BTreeSet<PathBuf>,
}

impl Inputs {
    fn find() -> Result<Self> {
        let busybox = find_program("busybox", "busybox-static")?;
        if !shared_libraries(&busybox)?.is_empty() {
            bail!("{} needs shared libraries; install busybox-static", busybox.display());
        }
        let tools = TOOLS
            .into_iter()
            .map(|(name, package)| find_program(name, package))
            .collect::<Result<Vec<_>>>()?;
        let mut libraries = BTreeSet::new();
        for tool in &tools {
            libraries.extend(shared_libraries(tool)?);
        }
        Ok(Self { uml: None, busybox, tools, libraries })
    }

    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        LAYOUT.hash(&mut hasher);
        INIT.hash(&mut hasher);
        TREE_STRESS.hash(&mut hasher);
        let config = PathBuf::from(MKE2FS_CONFIG);
        let files = self.tools.iter().chain(&self.libraries);
        for path in files.chain([&self.busybox, &config]).chain(&self.uml) {
            path.hash(&mut hasher);
            let metadata = path.metadata().ok();
            metadata
                .map(|metadata| (metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
                .hash(&mut hasher);
        }
        hasher.finish()
    }
}

fn build(inputs: Inputs, folder: &Path) -> Result<Image> {
    eprintln!("guest: building an image (QEMU's kernel is downloaded once)");
    let parent = guest_dir()?;
    // The image is built beside its final place, so that an incomplete image is never found.
    let staging = tempfile::Builder::new()
        .prefix("building-")
        .tempdir_in(&parent)
        .with_context(|| format!("making a folder in {}", parent.display()))?;
    let made = make_folder(staging.path(), "image")?;
    let mut inputs = inputs;
    inputs.tools.push(build_tree_stress(staging.path())?);
    let kernel = match inputs.uml.take() {
        Some(uml) => kernel::user_mode_linux(uml)?,
        None => {
            let udev = make_folder(staging.path(), "udev")?;
            kernel::download(&[UDEV.to_owned()], &udev)?;
            let mut paths = SCSI_ID.into_iter().map(|path| udev.join(path));
            let scsi_id = paths.find(|path| path.is_file());
            let scsi_id =
                scsi_id.context("the package udev has no scsi_id where it is expected")?;
            inputs.libraries.extend(shared_libraries(&scsi_id)?);
            inputs.tools.push(scsi_id);
            kernel::fetch(&make_folder(staging.path(), "unpacked")?)?
        }
    };
    std::fs::copy(&kernel.vmlinuz, made.join("vmlinuz")).context("copying the kernel")?;
    write_initramfs(&inputs, &kernel, &made.join("initramfs.cpio"))?;
    std::fs::write(made.join("kernel-version"), &kernel.version)
        .context("writing the kernel's version")?;
    std::fs::rename(&made, folder)
        .with_context(|| format!("moving the image to {}", folder.display()))?;
    Image::open(folder).with_context(|| format!("{} vanished", folder.display()))
}

/// Builds the program for guests, which lack most libraries.
fn build_tree_stress(folder: &Path) -> Result<PathBuf> {
    let source = folder.join("tree_stress.rs");
    std::fs::write(&source, TREE_STRESS).context("writing the source of tree_stress")?;
    let program = folder.join("tree_stress");
    let mut compiler = Command::new("rustc");
    compiler
        .current_dir(workspace::root())
        .args(["--edition", "2024", "-O", "-C", "target-feature=+crt-static"])
        .args(["-C", "strip=symbols", "-o"])
        .arg(&program)
        .arg(&source);
    output(&mut compiler).context("building tree_stress for the guest")?;
    Ok(program)
}

fn make_folder(parent: &Path, name: &str) -> Result<PathBuf> {
    let folder = parent.join(name);
    std::fs::create_dir(&folder).with_context(|| format!("making {}", folder.display()))?;
    Ok(folder)
}

fn write_initramfs(inputs: &Inputs, kernel: &Kernel, path: &Path) -> Result<()> {
    let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let writing = || format!("writing {}", path.display());
    let mut archive = Archive::new(BufWriter::new(file));
    archive.file("init", 0o755, INIT.as_bytes()).with_context(writing)?;
    // Before it runs init, the kernel opens this node as its standard input and output.
    archive.character_device("dev/console", (5, 1)).with_context(writing)?;

    add_file(&mut archive, &inputs.busybox, "bin/busybox")?;
    for tool in &inputs.tools {
        let name = tool.file_name().unwrap_or_default().to_string_lossy();
        add_file(&mut archive, tool, &format!("usr/sbin/{name}"))?;
    }
    for library in &inputs.libraries {
        add_file(&mut archive, library, &library.to_string_lossy())?;
    }
    archive.symlink("usr/sbin/mkfs.ext4", "mke2fs").with_context(writing)?;
    if Path::new(MKE2FS_CONFIG).exists() {
        add_file(&mut archive, Path::new(MKE2FS_CONFIG), MKE2FS_CONFIG)?;
    }

    let mut order = String::new();
    for module in &kernel.modules {
        let name = format!("{}.ko", module.name);
        archive.file(&format!("modules/{name}"), 0o644, &module.content).with_context(writing)?;
        order.push_str(&name);
        order.push('\n');
    }
    archive.file("modules/order", 0o644, order.as_bytes()).with_context(writing)?;
    archive.finish().with_context(writing)?;
    Ok(())
}

fn add_file(archive: &mut Archive<BufWriter<File>>, source: &Path, path: &str) -> Result<()> {
    let content = std::fs::read(source).with_context(|| format!("reading {}", source.display()))?;
    archive
        .file(path, 0o755, &content)
        .with_context(|| format!("putting {} into the initramfs", source.display()))
}

/// The absolute path of a program.
///
/// # Errors
/// If there is none; the error names the package to install.
pub(crate) fn find_program(name: &str, package: &str) -> Result<PathBuf> {
    workspace::find_program(name)
        .with_context(|| format!("{name} is not installed; apt-get install {package}"))
}

/// The shared libraries of `program` and the loader, at the paths where the loader expects them.
///
/// # Errors
/// If a library is missing.
pub fn shared_libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let listing =
        Command::new("ldd").arg(program).env("LC_ALL", "C").output().context("running ldd")?;
    // ldd fails for a static program, which is not an error here.
    let listing = String::from_utf8_lossy(&listing.stdout);
    if let Some(line) = listing.lines().find(|line| line.contains("not found")) {
        bail!("{} cannot run here: {}; install its package again", program.display(), line.trim());
    }
    Ok(library_paths(&listing))
}

/// The paths in the output of ldd: `name => path (address)` or `path (address)`.
fn library_paths(listing: &str) -> Vec<PathBuf> {
    listing
        .lines()
        .filter_map(|line| {
            let (front, _address) = line.trim().rsplit_once(" (")?;
            let path = front.rsplit_once(" => ").map_or(front, |(_, path)| path);
            path.starts_with('/').then(|| PathBuf::from(path))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_ldd_is_parsed() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                       \tlibaio.so.1 => /lib/x86_64-linux-gnu/libaio.so.1 (0x00007f5e)\n\
                       \t/lib64/ld-linux-x86-64.so.2 (0x00007f5f)\n";
        let paths = library_paths(listing);
        assert_eq!(
            paths,
            [
                PathBuf::from("/lib/x86_64-linux-gnu/libaio.so.1"),
                PathBuf::from("/lib64/ld-linux-x86-64.so.2")
            ]
        );
        assert!(library_paths("\tstatically linked\n").is_empty());
    }

    #[test]
    fn a_missing_program_names_its_package() {
        let error = find_program("no-such-program", "the-package").unwrap_err();
        assert!(error.to_string().contains("apt-get install the-package"), "{error}");
    }
}
