//! Paths and programs: the tree, the target directory, the `ringhaul` binary, cargo.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use anyhow::{Context, Result, bail, ensure};

/// The folder of the root `Cargo.toml`.
pub fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let built = env!("CARGO_MANIFEST_DIR");
        // Two checkouts may share a target directory: cargo names the one that it runs for.
        let run = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| built.to_owned());
        let is_root = |folder: &&Path| folder.join("tools/src/workspace.rs").is_file();
        let found = [run.as_str(), built].map(|folder| Path::new(folder).ancestors().find(is_root));
        found.into_iter().flatten().next().unwrap_or(Path::new(built)).to_owned()
    });
    &ROOT
}

/// Returns cargo's target directory, as the environment or the configuration sets it.
pub fn target_dir() -> Result<PathBuf> {
    let output = cargo()
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .context("running cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("reading the output of cargo metadata")?;
    match metadata["target_directory"].as_str() {
        Some(path) => Ok(PathBuf::from(path)),
        None => bail!("cargo metadata names no target_directory"),
    }
}

/// Returns the release build of the daemon: `RINGHAUL_BIN` if that is set, else a build of this
/// tree.
pub fn ringhaul_binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("RINGHAUL_BIN") {
        let path = PathBuf::from(path);
        let absolute = std::path::absolute(&path)
            .with_context(|| format!("RINGHAUL_BIN={} is no path", path.display()))?;
        if !absolute.is_file() {
            bail!("RINGHAUL_BIN={} is not a file; unset it to build here", path.display());
        }
        return Ok(absolute);
    }
    let status = cargo()
        .args(["build", "--release", "--package", "ringhaul-cli"])
        .status()
        .context("running cargo build")?;
    if !status.success() {
        bail!("cargo build --release --package ringhaul-cli failed; its messages are above");
    }
    let binary = target_dir()?.join("release/ringhaul");
    if !binary.is_file() {
        bail!("cargo build was successful but {} is not there", binary.display());
    }
    Ok(binary)
}

/// Returns the cargo that runs this program, in the root of the tree.
pub fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

/// Puts the files of a revision into `folder`, with the present time as their modification time:
/// cargo rebuilds nothing whose sources are older than its output.
pub fn extract(revision: &str, folder: &Path) -> Result<()> {
    let mut archive = Command::new("git")
        .current_dir(root())
        .args(["archive", revision])
        .stdout(Stdio::piped())
        .spawn()
        .context("running git archive")?;
    let content = archive.stdout.take().context("git archive has no output")?;
    let tar = Command::new("tar").args(["-x", "-m"]).current_dir(folder).stdin(content).status()?;
    let archived = archive.wait().context("waiting for git archive")?.success();
    ensure!(archived && tar.success(), "git has no revision {revision}");
    Ok(())
}

/// The reason for skipping tasks that need a nightly toolchain.
pub const NO_NIGHTLY: &str = "there is no nightly toolchain: rustup toolchain install nightly";

/// Returns the cargo of the nightly toolchain, in the root of the tree, if rustup has one.
pub fn nightly() -> Option<Command> {
    let rustup = find_program("rustup")?;
    let run = |program: &str| {
        let mut command = Command::new(&rustup);
        command.args(["run", "nightly", program]).current_dir(root());
        command
    };
    // rustup must not fetch a toolchain.
    let there = run("rustc").arg("--version").env("RUSTUP_AUTO_INSTALL", "0").output().ok()?;
    there.status.success().then(|| run("cargo"))
}

/// Returns the absolute path of `name` if it is an executable file in PATH or an sbin folder.
///
/// Debian leaves the sbin folders out of the PATH of ordinary users.
pub fn find_program(name: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;

    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/local/sbin", "/usr/sbin", "/sbin"].into_iter().map(PathBuf::from);
    std::env::split_paths(&path).chain(sbin).map(|folder| folder.join(name)).find(|candidate| {
        candidate
            .metadata()
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    })
}
