//! Fetches a distribution's kernel for virtual machines, and selects the modules that a guest
//! needs.
//!
//! Nothing is installed: `apt-get download` and `dpkg-deb --extract` work for any user as soon as
//! apt has its package lists.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_tools::process::{output, output_bytes};

/// Packages that depend on the newest small kernel for virtual machines: Debian's, then Ubuntu's.
/// The first package that apt knows is used.
const META_PACKAGES: [&str; 3] =
    ["linux-image-cloud-amd64", "linux-image-virtual", "linux-image-kvm"];

/// Modules for a guest's disks and for ext4. Their dependencies are added.
const REQUIRED_MODULES: [&str; 5] = ["virtio_blk", "virtio_scsi", "sd_mod", "sg", "ext4"];

/// The module for QEMU's virtio devices.
const QEMU_MODULES: [&str; 1] = ["virtio_pci"];

/// The front-end of User Mode Linux.
const UML_MODULES: [&str; 1] = ["virtio_uml"];

/// The modules of User Mode Linux, in a folder for each version.
const UML_MODULE_FOLDER: &str = "/usr/lib/uml/modules";

/// A module that ext4 requests by a name, which its dependencies do not show. Newer kernels do
/// without.
const OPTIONAL_MODULES: [&str; 1] = ["crc32c_generic"];

/// A kernel module, decompressed.
pub(crate) struct Module {
    /// Its name, with underscores.
    pub(crate) name: String,
    /// The ELF file that `insmod` takes.
    pub(crate) content: Vec<u8>,
}

/// A kernel unpacked from its packages.
pub(crate) struct Kernel {
    /// Package name and version, for people.
    pub(crate) version: String,
    /// The bzImage that QEMU starts, or the program of User Mode Linux.
    pub(crate) vmlinuz: PathBuf,
    /// The modules in the order of insertion.
    pub(crate) modules: Vec<Module>,
}

/// Downloads the kernel that the distribution offers now and unpacks it in `folder`.
///
/// # Errors
/// If apt knows no such kernel or cannot fetch it, or the kernel lacks a module.
pub(crate) fn fetch(folder: &Path) -> Result<Kernel> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "test guests need an x86-64 host; this is {}",
        std::env::consts::ARCH
    );
    let meta = META_PACKAGES.into_iter().find_map(|name| show(name).ok()).with_context(|| {
        format!(
            "apt offers none of the kernels {}; run apt-get update, or add the package \
                 sources of Debian or Ubuntu",
            META_PACKAGES.join(", ")
        )
    })?;
    let image = dependency(&meta, "linux-image-")
        .with_context(|| format!("the kernel package depends on no image:\n{meta}"))?;
    let description = show(&image)?;
    let version = field(&description, "Version").unwrap_or("of unknown version");

    let mut packages = vec![image.clone()];
    // Ubuntu keeps the modules in a package of their own.
    packages.extend(dependency(&description, "linux-modules-"));
    download(&packages, folder)?;

    let release = image.trim_start_matches("linux-image-").trim_start_matches("unsigned-");
    let vmlinuz = folder.join(format!("boot/vmlinuz-{release}"));
    ensure!(
        vmlinuz.is_file(),
        "{image} has no boot/vmlinuz-{release}; the layout of the package is not known"
    );
    let candidates = ["lib/modules", "usr/lib/modules"];
    let tree = candidates
        .into_iter()
        .map(|parent| folder.join(parent).join(release))
        .find(|tree| tree.is_dir())
        .with_context(|| format!("{image} has no lib/modules/{release}"))?;
    Ok(Kernel {
        version: format!("{image} {version}"),
        vmlinuz,
        modules: ModuleTree::read(&tree)?.select(&QEMU_MODULES)?,
    })
}

/// The installed kernel of User Mode Linux, whose program is `vmlinuz`.
///
/// # Errors
/// If it does not run, or has no modules.
pub(crate) fn user_mode_linux(vmlinuz: PathBuf) -> Result<Kernel> {
    // Modules of an earlier version may be left.
    let release = output(Command::new(&vmlinuz).arg("--version"))?;
    let tree = Path::new(UML_MODULE_FOLDER).join(&release);
    Ok(Kernel {
        version: format!("User Mode Linux {release}"),
        vmlinuz,
        modules: ModuleTree::read(&tree)?.select(&UML_MODULES)?,
    })
}

/// The control fields of the version of `package` that apt would install.
fn show(package: &str) -> Result<String> {
    output(Command::new("apt-cache").args(["show", "--no-all-versions", package]))
}

/// Downloads packages and unpacks them in `folder`.
///
/// # Errors
/// If apt cannot fetch one.
pub(crate) fn download(packages: &[String], folder: &Path) -> Result<()> {
    let downloading = || {
        let packages = packages.join(" ");
        format!("downloading {packages} for guests; run apt-get update if apt's lists are old")
    };
    output(Command::new("apt-get").arg("download").args(packages).current_dir(folder))
        .with_context(downloading)?;
    for path in files_below(folder)? {
        if path.extension() == Some(OsStr::new("deb")) {
            output(Command::new("dpkg-deb").arg("--extract").args([&path, folder]))?;
            std::fs::remove_file(&path)
                .with_context(|| format!("removing {} after unpacking", path.display()))?;
        }
    }
    Ok(())
}

/// The value of a one-line control field.
fn field<'a>(control: &'a str, name: &str) -> Option<&'a str> {
    control.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

/// The first package in `Depends` with a name that starts with `prefix`, without its version.
fn dependency(control: &str, prefix: &str) -> Option<String> {
    let depends = field(control, "Depends")?;
    depends
        .split([',', '|'])
        .filter_map(|dependency| dependency.split_whitespace().next())
        .find(|name| name.starts_with(prefix))
        .map(str::to_owned)
}

/// The modules of one kernel: in files, and built into the image.
struct ModuleTree {
    files: Vec<PathBuf>,
    builtin: BTreeSet<String>,
}

impl ModuleTree {
    fn read(tree: &Path) -> Result<Self> {
        let list = tree.join("modules.builtin");
        let builtin = std::fs::read_to_string(&list)
            .with_context(|| format!("reading {}", list.display()))?;
        Ok(Self {
            files: files_below(tree)?,
            builtin: builtin.lines().filter_map(module_name).collect(),
        })
    }

    /// The wanted modules, among them those of a machine, and all their dependencies, dependencies
    /// first.
    fn select(&self, of_machine: &[&str]) -> Result<Vec<Module>> {
        let mut selected = Vec::new();
        for name in of_machine.iter().chain(&REQUIRED_MODULES) {
            self.add(name, &mut selected)?;
        }
        for name in OPTIONAL_MODULES {
            if self.find(name).is_some() {
                self.add(name, &mut selected)?;
            }
        }
        Ok(selected)
    }

    fn add(&self, name: &str, selected: &mut Vec<Module>) -> Result<()> {
        if self.builtin.contains(name) || selected.iter().any(|module| module.name == name) {
            return Ok(());
        }
        let path = self.find(name).with_context(|| {
            format!("the kernel has no module {name}, neither in it nor beside")
        })?;
        let content = decompressed(path)?;
        for dependency in dependencies(&content) {
            self.add(&dependency, selected)?;
        }
        selected.push(Module { name: name.to_owned(), content });
        Ok(())
    }

    fn find(&self, name: &str) -> Option<&PathBuf> {
        self.files.iter().find(|path| path.to_str().and_then(module_name).as_deref() == Some(name))
    }
}

/// The name of the module in the file `path` (`.ko`, possibly compressed), if it is one.
fn module_name(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    let (name, suffix) = file.split_once(".ko")?;
    (suffix.is_empty() || suffix.starts_with('.')).then(|| name.replace('-', "_"))
}

/// The dependencies of a module: `depends=` in its .modinfo section, in which a zero byte ends each
/// entry. A package has no modules.dep, which its installation makes.
fn dependencies(module: &[u8]) -> Vec<String> {
    module
        .split(|&byte| byte == 0)
        .filter_map(|entry| std::str::from_utf8(entry).ok()?.strip_prefix("depends="))
        .flat_map(|names| names.split(','))
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

fn decompressed(path: &Path) -> Result<Vec<u8>> {
    let tool = match path.extension().and_then(OsStr::to_str) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return std::fs::read(path).with_context(|| format!("reading {}", path.display())),
    };
    output_bytes(Command::new(tool).args(["--decompress", "--stdout"]).arg(path))
}

fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let reading = || format!("reading the folder {}", folder.display());
        for entry in std::fs::read_dir(&folder).with_context(reading)? {
            let entry = entry.with_context(reading)?;
            let kind = entry.file_type().with_context(reading)?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_of_packages_are_found_without_their_versions() {
        let control = "Package: linux-image-x\nVersion: 1-2\n\
                       Depends: kmod, linux-modules-6.8.0-31-generic (= 1), linux-image-6 (= 2)\n";
        assert_eq!(field(control, "Version"), Some("1-2"));
        assert_eq!(
            dependency(control, "linux-modules-").as_deref(),
            Some("linux-modules-6.8.0-31-generic")
        );
        assert_eq!(dependency(control, "linux-image-").as_deref(), Some("linux-image-6"));
        assert_eq!(dependency(control, "linux-headers-"), None);
    }

    #[test]
    fn names_of_modules_come_from_their_files() {
        assert_eq!(module_name("kernel/fs/ext4/ext4.ko").as_deref(), Some("ext4"));
        assert_eq!(module_name("a/crc32c-intel.ko.zst").as_deref(), Some("crc32c_intel"));
        assert_eq!(module_name("a/modules.order"), None);
        assert_eq!(module_name("a/x.kohl"), None);
    }

    #[test]
    fn dependencies_of_modules_come_from_modinfo() {
        let module = b"\x7fELF\0license=GPL\0depends=virtio-ring,virtio\0retpoline=Y\0";
        assert_eq!(dependencies(module), ["virtio_ring", "virtio"]);
        assert!(dependencies(b"\x7fELF\0depends=\0name=x\0").is_empty());
    }
}
