//! The file in which registrations and the reservation of a disk persist through a loss of power
//! (APTPL; SPC-4, section 5.13.5.1).
//!
//! The file exists if the last registration asked for that. Each change replaces it as a whole
//! before the command is answered. Its format is JSON, so that an operator can read and mend it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::locked_file::LockedFile;
use super::registry::{Key, PortName, Registry, Reservation, ReservationType, digits};

const FORMAT: &str = "ringhaul persistent reservations";
const VERSION: u32 = 1;
/// The most bytes of a file. A full registry needs a seventh.
const BYTES_MAX: u64 = 64 << 10;

/// A failure to load or save persistent reservations.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {action} the persistent reservations in {}: {reason}; {advice}", path.display())]
pub(crate) struct FileError {
    action: &'static str,
    path: PathBuf,
    reason: String,
    advice: &'static str,
}

const ADVICE_READ: &str = "make the file readable for this user";
const ADVICE_BROKEN: &str = "restore or repair the file; remove it only if no fenced host can \
                             still write to the disk";
const ADVICE_BUSY: &str = "stop that program, or choose another reservations file for this disk";
const ADVICE_DESCRIPTORS: &str = "raise the limit on open files (ulimit -n)";
const ADVICE_KIND: &str = "choose the path of a regular file, which need not exist";
const ADVICE_VERSION: &str = "use the version that wrote the file";
const ADVICE_SAVE: &str = "make the directory writable for this user and check its free space; \
                           until then, commands that change reservations fail";

/// The start of a file of any version.
#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

/// A file of this version.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    format: String,
    version: u32,
    registrations: Vec<SavedRegistration>,
    reservation: Option<SavedReservation>,
}

/// Names and keys are 16 hexadecimal digits.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedRegistration {
    port: String,
    key: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedReservation {
    r#type: ReservationType,
    /// `None` for an all registrants type.
    holder: Option<String>,
}

/// The known content of the file.
#[derive(Debug, PartialEq, Eq)]
enum Content {
    Absent,
    Registry(Registry),
    /// A change of the file failed halfway.
    Unknown,
}

/// The file of one disk.
#[derive(Debug)]
pub(super) struct StateFile {
    file: LockedFile,
    content: Content,
}

impl StateFile {
    /// Loads saved reservations. From then on no other program can use the file.
    ///
    /// # Errors
    ///
    /// If there is a file that cannot be read, was not written by [`save`](Self::save), or is in
    /// use.
    pub(super) fn load(path: PathBuf) -> Result<(Self, Registry), FileError> {
        let failed = |(reason, advice)| FileError::new("load", &path, reason, advice);
        let (file, text) = LockedFile::take(path.clone(), BYTES_MAX)
            .map_err(|error| failed(reason(&error, ADVICE_READ)))?;
        let Some(text) = text else {
            return Ok((Self { file, content: Content::Absent }, Registry::default()));
        };
        let registry = parse(&text).map_err(failed)?;
        Ok((Self { file, content: Content::Registry(registry.clone()) }, registry))
    }

    /// A file that is not loaded yet, and may belong to another host until it is
    /// [taken](Self::take).
    pub(super) fn later(path: PathBuf) -> Self {
        Self { file: LockedFile::handed_over(path, None), content: Content::Absent }
    }

    /// Loads saved reservations, unless the file belongs to this owner already. `None`: there is no
    /// file, as before.
    ///
    /// # Errors
    ///
    /// Like [`load`](Self::load).
    pub(super) fn take(&mut self) -> Result<Option<Registry>, FileError> {
        if self.file.locked().is_some() {
            return Ok(None);
        }
        let was_absent = self.is_absent();
        let (loaded, registry) = Self::load(self.path().to_owned())?;
        *self = loaded;
        // If it is gone, an initiator on another host has cleared APTPL.
        Ok((!was_absent || !self.is_absent()).then_some(registry))
    }

    /// Leaves the file to another owner until it is [taken](Self::take) again.
    pub(super) fn release(&mut self) {
        self.file.release();
    }

    /// Takes over the file of another process, which last loaded or saved this registry, or failed
    /// to do so if `is_unknown`.
    pub(super) fn handed_over(
        path: PathBuf,
        file: Option<File>,
        registry: &Registry,
        is_unknown: bool,
    ) -> Self {
        let content = match (is_unknown, registry.aptpl) {
            (true, _) => Content::Unknown,
            (false, true) => Content::Registry(registry.clone()),
            (false, false) => Content::Absent,
        };
        Self { file: LockedFile::handed_over(path, file), content }
    }

    /// The open file, and true if its content is unknown.
    pub(super) fn hand_over(&self) -> (Option<&File>, bool) {
        (self.file.locked(), self.content == Content::Unknown)
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// True if there is no file.
    pub(super) fn is_absent(&self) -> bool {
        self.content == Content::Absent
    }

    /// Saves the registry durably, or removes the file if the registry need not persist. Waits for
    /// the disk.
    ///
    /// # Errors
    ///
    /// If the file cannot be replaced or removed. It then has its new or its old content.
    pub(super) fn save(&mut self, registry: &Registry) -> Result<(), FileError> {
        let wanted =
            if registry.aptpl { Content::Registry(registry.clone()) } else { Content::Absent };
        if self.content == wanted {
            return Ok(());
        }
        self.content = Content::Unknown;
        let kept = if registry.aptpl { self.replace(registry) } else { self.file.remove() };
        kept.map_err(|error| {
            let (reason, advice) = reason(&error, ADVICE_SAVE);
            FileError::new("save", self.path(), reason, advice)
        })?;
        self.content = wanted;
        Ok(())
    }

    fn replace(&mut self, registry: &Registry) -> io::Result<()> {
        self.file.replace(&text_of(registry)?)
    }
}

impl FileError {
    fn new(action: &'static str, path: &Path, reason: String, advice: &'static str) -> Self {
        Self { action, path: path.to_owned(), reason, advice }
    }

    /// Exports of one disk chose `path` and another place for its reservations.
    pub(super) fn elsewhere(path: &Path, other: Option<&Path>) -> Self {
        let reason = match other {
            Some(other) => format!("other exports of the disk use {}", other.display()),
            None => "other exports of the disk use no reservations file".to_owned(),
        };
        Self::new("keep", path, reason, "name the same file for all exports of the disk")
    }
}

/// Returns the reason why a file cannot be used, and advice: `usual` if the error has none of its
/// own.
fn reason(error: &io::Error, usual: &'static str) -> (String, &'static str) {
    match error.kind() {
        io::ErrorKind::InvalidData => ("it is not text".to_owned(), ADVICE_BROKEN),
        io::ErrorKind::ResourceBusy => (error.to_string(), ADVICE_BUSY),
        // Errors of the kernel have a number.
        io::ErrorKind::InvalidInput if error.raw_os_error().is_none() => {
            (error.to_string(), ADVICE_KIND)
        }
        _ if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            (error.to_string(), ADVICE_DESCRIPTORS)
        }
        _ => (error.to_string(), usual),
    }
}

impl Saved {
    fn from_registry(registry: &Registry) -> Self {
        let registrations = registry.registrations().iter();
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            registrations: registrations
                .map(|registration| SavedRegistration {
                    port: registration.port.to_string(),
                    key: format!("{:016x}", registration.key),
                })
                .collect(),
            reservation: registry.reservation.map(|held| SavedReservation {
                r#type: held.reservation_type,
                holder: held.holder.map(|holder| holder.to_string()),
            }),
        }
    }
}

/// The text of a file.
pub(super) fn text_of(registry: &Registry) -> io::Result<String> {
    let mut text = serde_json::to_string_pretty(&Saved::from_registry(registry))?;
    text.push('\n');
    Ok(text)
}

/// Parses the text of a file. On failure, returns the fault and advice.
pub(super) fn parse(text: &str) -> Result<Registry, (String, &'static str)> {
    let broken = |reason: String| (reason, ADVICE_BROKEN);
    if u64::try_from(text.len()).is_ok_and(|bytes| bytes > BYTES_MAX) {
        return Err(broken(format!("it has more than {BYTES_MAX} bytes")));
    }
    let header: Header = serde_json::from_str(text).map_err(|error| broken(error.to_string()))?;
    if header.format != FORMAT {
        return Err(broken(format!("its format is {:?}, not {FORMAT:?}", header.format)));
    }
    if header.version != VERSION {
        let reason =
            format!("it has version {}; only version {VERSION} is supported", header.version);
        return Err((reason, ADVICE_VERSION));
    }
    let saved: Saved = serde_json::from_str(text).map_err(|error| broken(error.to_string()))?;
    registry(&saved).map_err(broken)
}

/// Checks all conditions that the rules rely on.
fn registry(saved: &Saved) -> Result<Registry, String> {
    let mut registry = Registry::new(true);
    for SavedRegistration { port, key } in &saved.registrations {
        let name = PortName::parse(port)?;
        let key = digits(key)
            .and_then(Key::new)
            .ok_or_else(|| format!("{key:?} is not a key of 16 hexadecimal digits"))?;
        if registry.key_of(name).is_some() {
            return Err(format!("port {port} is registered twice"));
        }
        registry.set_key(name, key).map_err(|_| "it has too many registrations".to_owned())?;
    }
    let Some(SavedReservation { r#type: reservation_type, holder }) = &saved.reservation else {
        return Ok(registry);
    };
    let holder = holder.as_deref().map(PortName::parse).transpose()?;
    if holder.is_none() != reservation_type.is_all_registrants() {
        return Err(format!(
            "its reservation of type {reservation_type:?} has a superfluous holder or lacks one"
        ));
    }
    let is_held = match holder {
        Some(holder) => registry.key_of(holder).is_some(),
        None => !registry.registrations().is_empty(),
    };
    if !is_held {
        return Err("the holder of its reservation is not registered".to_owned());
    }
    registry.reservation = Some(Reservation { reservation_type: *reservation_type, holder });
    Ok(registry)
}

#[cfg(test)]
mod tests {
    use super::super::tests::when_free;
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{CWD, Mode, mkfifoat};
    use tempfile::TempDir;

    const PORTS: [PortName; 2] = [PortName([0x31; 8]), PortName([0, 0, 0, 0, 0, 0, 0, 0xfe])];

    fn with(reservation_type: Option<ReservationType>) -> Registry {
        let mut registry = Registry::new(true);
        registry.set_key(PORTS[0], Key::MIN).unwrap();
        registry.set_key(PORTS[1], Key::MAX).unwrap();
        registry.reservation = reservation_type.map(|known| Reservation::new(known, PORTS[1]));
        registry
    }

    fn directory() -> (TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.reservations");
        (directory, path)
    }

    fn files(directory: &TempDir) -> usize {
        fs::read_dir(directory.path()).unwrap().count()
    }

    fn load(path: &Path) -> Result<Registry, FileError> {
        StateFile::load(path.to_owned()).map(|(_, registry)| registry)
    }

    /// The registry that would be loaded from the file without its lock.
    fn kept_in(path: &Path) -> Registry {
        let copy = path.with_extension("copy");
        fs::copy(path, &copy).unwrap();
        let registry = load(&copy).unwrap();
        fs::remove_file(copy).unwrap();
        registry
    }

    #[test]
    fn saved_reservations_are_loaded() {
        let (directory, path) = directory();
        let (mut file, registry) = StateFile::load(path.clone()).unwrap();
        assert_eq!(registry, Registry::default());
        for reservation_type in ReservationType::ALL.map(Some).into_iter().chain([None]) {
            let registry = with(reservation_type);
            file.save(&registry).unwrap();
            assert_eq!(kept_in(&path), registry);
            assert_eq!(files(&directory), 1);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        let empty = Registry::new(true);
        file.save(&empty).unwrap();
        assert_eq!(kept_in(&path), empty);
    }

    #[test]
    fn only_persistent_reservations_are_in_a_file() {
        let (directory, path) = directory();
        let (mut file, _) = StateFile::load(path.clone()).unwrap();
        let mut volatile = with(None);
        volatile.aptpl = false;
        file.save(&volatile).unwrap();
        assert_eq!(files(&directory), 0);
        file.save(&with(None)).unwrap();
        drop(file);
        let (mut file, _) = when_free(|| StateFile::load(path.clone()));
        file.save(&volatile).unwrap();
        assert_eq!(files(&directory), 0);
    }

    #[test]
    fn the_file_is_left_alone_while_it_is_right() {
        use std::os::unix::fs::MetadataExt;
        let (_directory, path) = directory();
        let (mut file, _) = StateFile::load(path.clone()).unwrap();
        file.save(&with(None)).unwrap();
        let inode = || fs::metadata(&path).unwrap().ino();
        // While the old file is open, its inode number is not used again.
        let (_open, before) = (File::open(&path).unwrap(), inode());
        file.save(&with(None)).unwrap();
        drop(file);
        let (mut file, registry) = when_free(|| StateFile::load(path.clone()));
        file.save(&registry).unwrap();
        assert_eq!(inode(), before);
        file.save(&with(Some(ReservationType::WriteExclusive))).unwrap();
        assert_ne!(inode(), before);
    }

    #[test]
    fn a_file_that_a_crash_left_behind_is_replaced() {
        let (directory, path) = directory();
        fs::write(directory.path().join("disk.reservations.new"), "half a fi").unwrap();
        let (mut file, registry) = StateFile::load(path.clone()).unwrap();
        assert_eq!(registry, Registry::default());
        file.save(&with(None)).unwrap();
        assert_eq!(kept_in(&path), with(None));
        assert_eq!(files(&directory), 1);
    }

    #[test]
    fn after_a_failure_the_next_change_is_written_again() {
        let (directory, path) = directory();
        let (mut file, _) = StateFile::load(path.clone()).unwrap();
        file.save(&with(None)).unwrap();
        // A directory in its place prevents the creation of a file, for all users.
        let obstacle = directory.path().join("disk.reservations.new");
        fs::create_dir(&obstacle).unwrap();
        let held = with(Some(ReservationType::ExclusiveAccess));
        let error = file.save(&held).unwrap_err().to_string();
        assert!(error.starts_with("cannot save the persistent reservations in /"), "{error}");
        assert!(error.contains("disk.reservations: "), "{error}");
        assert_eq!(kept_in(&path), with(None));
        assert_eq!(file.content, Content::Unknown);
        fs::remove_dir(&obstacle).unwrap();
        file.save(&with(None)).unwrap();
        assert_eq!(file.content, Content::Registry(with(None)));
        assert_eq!(files(&directory), 1);
    }

    #[test]
    fn text_has_the_form_that_it_had() {
        let text = serde_json::to_string(&Saved::from_registry(&with(Some(
            ReservationType::WriteExclusiveRegistrantsOnly,
        ))));
        let expected = concat!(
            r#"{"format":"ringhaul persistent reservations","version":1,"registrations":["#,
            r#"{"port":"3131313131313131","key":"0000000000000001"},"#,
            r#"{"port":"00000000000000fe","key":"ffffffffffffffff"}],"#,
            r#""reservation":{"type":"write-exclusive-registrants-only","#,
            r#""holder":"00000000000000fe"}}"#
        );
        assert_eq!(text.unwrap(), expected);
    }

    #[test]
    fn each_way_in_which_a_file_is_broken_is_an_error_that_says_so() {
        let (_directory, path) = directory();
        let good = serde_json::to_string(&Saved::from_registry(&with(Some(
            ReservationType::ExclusiveAccess,
        ))));
        let good = good.unwrap();
        let registrations = &good[good.find("[{").unwrap() + 1..good.find("}]").unwrap() + 1];
        let many = [registrations; 2].join(",");
        let changed = |from: &str, to: &str| {
            assert!(good.contains(from), "{from}");
            good.replace(from, to)
        };
        for (text, expected) in [
            (String::new(), "EOF"),
            (good[..good.len() - 1].to_owned(), "EOF"),
            (format!("{good}{good}"), "trailing"),
            (changed("ringhaul persistent", "other"), "its format is \"other reservations\""),
            (
                changed(r#""version":1"#, r#""version":2"#),
                "version 2; only version 1 is supported; use",
            ),
            (changed(r#""version":1,"#, ""), "missing field `version`"),
            (changed(r#""version":1,"#, r#""version":1,"more":0,"#), "unknown field `more`"),
            (changed(registrations, &many), "registered twice"),
            (changed("0000000000000001", "0000000000000000"), "not a key of 16"),
            (changed("0000000000000001", "+000000000000001"), "not a key of 16"),
            (changed("0000000000000001", "000000000000001"), "not a key of 16"),
            (changed("3131313131313131", "0x31313131313131"), "is not a port"),
            (changed("exclusive-access", "exclusive"), "unknown variant `exclusive`"),
            (changed(r#""holder":"00000000000000fe""#, r#""holder":null"#), "or lacks one"),
            (
                changed("exclusive-access", "exclusive-access-all-registrants"),
                "has a superfluous holder",
            ),
            (changed(registrations, ""), "the holder of its reservation is not registered"),
            (changed(r#""holder":"00000000000000fe""#, r#""holder":"31""#), "is not a port"),
            (format!("{good}{}", " ".repeat(1 << 16)), "more than 65536 bytes"),
        ] {
            fs::write(&path, &text).unwrap();
            let error = load(&path).unwrap_err().to_string();
            let path = path.display();
            let start = format!("cannot load the persistent reservations in {path}: ");
            assert!(error.starts_with(&start), "{error}");
            assert!(error.contains(expected), "{error}, not {expected}");
        }
        fs::write(&path, [0xff; 9]).unwrap();
        assert!(load(&path).unwrap_err().to_string().contains("it is not text"));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = load(&path).unwrap_err().to_string();
        assert!(error.ends_with(&format!("it is not a regular file; {ADVICE_KIND}")), "{error}");
    }

    /// A reader or a writer of a named pipe waits for the other end.
    #[test]
    fn a_file_of_another_kind_is_refused_at_once() {
        let (directory, pipe) = directory();
        mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&pipe, &link).unwrap();
        let socket = directory.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [&pipe, &link, &socket, Path::new("/dev/null")] {
            let error = load(path).unwrap_err().to_string();
            let reason = format!("it is not a regular file; {ADVICE_KIND}");
            assert!(error.ends_with(&reason), "{}: {error}", path.display());
        }
    }

    #[test]
    fn a_file_has_no_more_registrations_than_a_disk() {
        let mut saved = Saved::from_registry(&with(None));
        for number in 0..=super::super::registry::REGISTRATIONS_MAX {
            let port = format!("{number:016x}");
            saved.registrations.push(SavedRegistration { port, key: "f".repeat(16) });
        }
        assert!(registry(&saved).unwrap_err().contains("too many"));
        saved.registrations.truncate(super::super::registry::REGISTRATIONS_MAX);
        let full = registry(&saved).unwrap();
        assert_eq!(full.registrations().len(), super::super::registry::REGISTRATIONS_MAX);
        let text = serde_json::to_string_pretty(&Saved::from_registry(&full)).unwrap();
        assert!(u64::try_from(text.len()).unwrap() < BYTES_MAX / 4, "{}", text.len());
    }
}
