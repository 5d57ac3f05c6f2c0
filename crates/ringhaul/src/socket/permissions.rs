//! Protects the daemon's sockets from other users: checks of their folders, their owner and mode.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fd::OwnedFd;
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, XattrFlags, chmod, chownat, fstat, openat, setxattr,
};
use rustix::process::{getegid, geteuid};

use crate::process::folder_of;

const STICKY: u32 = 0o1000;
const ALL_WRITE: u32 = 0o002;
const GROUP_WRITE: u32 = 0o020;

/// Checks that not every user can replace the socket at `path`.
///
/// # Errors
///
/// When the folder does not exist, or all users can write to it and it has no sticky bit.
pub(crate) fn check_folder(path: &Path) -> Result<()> {
    let folder = folder_of(path);
    let mode = metadata_of(folder)?.mode();
    if mode & ALL_WRITE != 0 && mode & STICKY == 0 {
        bail!(
            "every user can replace files in {0}; remove that permission (chmod o-w {0}) or choose \
             another folder",
            folder.display()
        );
    }
    Ok(())
}

/// Checks that only root, this user and the members of `group` can replace the socket at `path`.
///
/// # Errors
///
/// When the folder does not exist, belongs to another user, or strangers can write to it. A sticky
/// bit keeps strangers from files that are not theirs.
pub(crate) fn check_private_folder(path: &Path, group: Option<u32>) -> Result<()> {
    check_folder(path)?;
    let folder = folder_of(path);
    let (shown, found) = (folder.display(), metadata_of(folder)?);
    let (user, own_group) = (geteuid().as_raw(), getegid().as_raw());
    if ![0, user].contains(&found.uid()) {
        bail!(
            "{shown} belongs to user {}, who can replace files in it; choose a folder of root or \
             of user {user}",
            found.uid()
        );
    }
    let is_trusted = is_trusted_group(found.gid(), group, user, own_group);
    if found.mode() & GROUP_WRITE != 0 && found.mode() & STICKY == 0 && !is_trusted {
        bail!(
            "the members of group {} can replace files in {shown}; remove that permission (chmod \
             g-w {shown}) or choose another folder",
            found.gid()
        );
    }
    Ok(())
}

/// Returns true if only root, `user` and members of the `--control-group` are in a group.
/// `own_group` is that of this process.
fn is_trusted_group(group: u32, control_group: Option<u32>, user: u32, own_group: u32) -> bool {
    // Many systems give each user a private group with the number of the user.
    let is_private = group == own_group && own_group == user;
    group == 0 || Some(group) == control_group || is_private
}

/// The groups whose members may connect to a socket.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SocketGroups {
    /// The group that owns the socket.
    pub(crate) owner: Option<u32>,
    /// A second group, by an access control list.
    pub(crate) further: Option<u32>,
}

/// Gives the socket that this process has made at `path` to groups, if there are any, with mode
/// 0660. Follows no link, and leaves any other file that lies there by now unchanged.
///
/// # Errors
///
/// When the socket is gone, or the kernel refuses.
pub(crate) fn give_to(path: &Path, identity: (u64, u64), groups: SocketGroups) -> Result<()> {
    let shown = path.display();
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let node = openat(CWD, path, flags, Mode::empty())
        .with_context(|| format!("cannot examine the new socket {shown}"))?;
    let stat = fstat(&node).with_context(|| format!("cannot examine the new socket {shown}"))?;
    let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::Socket
        && (stat.st_dev, stat.st_ino) == identity
        && stat.st_uid == geteuid().as_raw();
    if !is_ours {
        bail!(
            "another file has replaced the new socket {shown}; check the permissions of its folder"
        );
    }
    // chmod does not work on a descriptor opened with `O_PATH`, but on its link in /proc.
    let link = format!("/proc/self/fd/{}", node.as_raw_fd());
    if let Some(group) = groups.owner {
        give_to_group(&node, &link, (path, group))?;
    }
    let Some(reader) = groups.further else { return Ok(()) };
    let list = access_list(groups.owner.is_some(), reader);
    setxattr(&link, "system.posix_acl_access", &list, XattrFlags::empty()).with_context(|| {
        format!(
            "cannot let the --control-read-group connect to {shown}: its file system must have \
             access control lists; choose a folder on tmpfs, such as /run"
        )
    })
}

/// Makes a group the owner of a socket, which `link` leads to too, with mode 0660.
fn give_to_group(node: &OwnedFd, link: &str, (path, group): (&Path, u32)) -> Result<()> {
    let shown = path.display();
    chownat(node, "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH).with_context(
        || {
            format!(
                "cannot give {shown} to the --control-group; run the daemon as root or as a member \
                 of it"
            )
        },
    )?;
    chmod(link, Mode::from_raw_mode(0o660))
        .with_context(|| format!("cannot let the --control-group connect to {shown}"))
}

/// An access control list, in the form of the kernel (`posix_acl_xattr.h`): the user reads and
/// writes, the owning group if `has_owner`, and the group `further`.
fn access_list(has_owner: bool, further: u32) -> Vec<u8> {
    const VERSION: u32 = 2;
    const NO_ID: u32 = u32::MAX;
    const READ_WRITE: u16 = 6;
    let [user, owning_group, group, mask, other] = [0x01_u16, 0x04, 0x08, 0x10, 0x20];
    let mut list = VERSION.to_le_bytes().to_vec();
    for (kind, rights, id) in [
        (user, READ_WRITE, NO_ID),
        (owning_group, if has_owner { READ_WRITE } else { 0 }, NO_ID),
        (group, READ_WRITE, further),
        (mask, READ_WRITE, NO_ID),
        (other, 0, NO_ID),
    ] {
        list.extend(kind.to_le_bytes());
        list.extend(rights.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    list
}

/// Returns the id of the group with this name or number.
///
/// # Errors
///
/// When there is no such group, or the system does not answer.
pub(crate) fn group_id(name: &str) -> Result<u32> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    let group = nix::unistd::Group::from_name(name)
        .with_context(|| format!("cannot look up the group {name}"))?;
    let no_group =
        || format!("there is no group {name}; use the name or number of an existing group");
    Ok(group.with_context(no_group)?.gid.as_raw())
}

fn metadata_of(folder: &Path) -> Result<std::fs::Metadata> {
    let shown = folder.display();
    let found = std::fs::metadata(folder).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            anyhow::anyhow!("the folder {shown} does not exist; create it (mkdir -p {shown})")
        }
        _ => anyhow::anyhow!("cannot examine the folder {shown}: {error}"),
    })?;
    if !found.is_dir() {
        bail!("{shown} is not a folder");
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o777
    }

    fn identity_of(path: &Path) -> (u64, u64) {
        let found = fs::symlink_metadata(path).unwrap();
        (found.dev(), found.ino())
    }

    /// The socket belongs to the group of the daemon's process if it was given to no other one.
    #[test]
    fn an_access_list_is_for_the_two_groups_alone() {
        const READ_WRITE: u16 = 6;
        for (has_owner, of_owning_group) in [(false, 0), (true, READ_WRITE)] {
            let list = access_list(has_owner, 77);
            let (version, entries) = list.split_at(4);
            assert_eq!(version, [2, 0, 0, 0]);
            let entries = entries.chunks(8).map(|entry| {
                let [kind, rights] =
                    [0, 2].map(|at| u16::from_le_bytes([entry[at], entry[at + 1]]));
                let id = u32::from_le_bytes(*entry[4..].first_chunk().unwrap());
                (kind, rights, id)
            });
            let all = [
                (1, READ_WRITE, u32::MAX),
                (4, of_owning_group, u32::MAX),
                (8, READ_WRITE, 77),
                (16, READ_WRITE, u32::MAX),
                (32, 0, u32::MAX),
            ];
            assert!(entries.eq(all), "{has_owner}: {list:?}");
        }
    }

    #[test]
    fn folders_that_others_can_write_to_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let is_root = geteuid().is_root();
        // Gives the folder to a group of strangers where that is possible.
        let stranger = 54_321;
        if is_root {
            std::os::unix::fs::chown(folder.path(), None, Some(stranger)).unwrap();
        }
        for (mode, is_safe, is_private) in [
            (0o755, true, true),
            (0o775, true, !is_root),
            (0o1775, true, true),
            (0o777, false, false),
            (0o1777, true, true),
        ] {
            fs::set_permissions(folder.path(), Permissions::from_mode(mode)).unwrap();
            assert_eq!(check_folder(&socket).is_ok(), is_safe, "{mode:o}");
            if is_root {
                let checked = check_private_folder(&socket, None);
                assert_eq!(checked.is_ok(), is_private, "{mode:o}: {checked:?}");
                let checked = check_private_folder(&socket, Some(stranger));
                assert_eq!(checked.is_ok(), is_safe, "{mode:o}: {checked:?}");
            }
        }
        if is_root {
            std::os::unix::fs::chown(folder.path(), Some(stranger), None).unwrap();
            let error = check_private_folder(&socket, None).unwrap_err().to_string();
            assert!(error.contains("belongs to user 54321"), "{error}");
        }
        let missing = check_folder(&folder.path().join("no/socket")).unwrap_err().to_string();
        assert!(missing.contains("does not exist"), "{missing}");
    }

    /// The usual group of a user may have other members.
    #[test]
    fn a_group_with_strangers_is_not_trusted() {
        let (user, users, control) = (1000, 100, Some(7));
        for (group, own_group, expected) in [
            (0, users, true),
            (7, users, true),
            (user, user, true),
            (users, users, false),
            (user, users, false),
            (users, user, false),
        ] {
            let is_trusted = is_trusted_group(group, control, user, own_group);
            assert_eq!(is_trusted, expected, "{group} for {user} in {own_group}");
        }
        assert!(!is_trusted_group(7, None, user, user));
    }

    /// Simulates a lost race in the folder: another file lies there when the socket gets its owner.
    #[test]
    fn nothing_but_the_socket_gets_its_owner_and_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (socket, secret) = (path("socket"), path("secret"));
        fs::write(&secret, "").unwrap();
        fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let own = SocketGroups { owner: Some(getegid().as_raw()), further: None };
        let identity = identity_of(&socket);
        give_to(&socket, identity, own).unwrap();
        assert_eq!(mode_of(&socket), 0o660);
        if geteuid().is_root() {
            std::os::unix::fs::chown(&socket, Some(54_321), None).unwrap();
            assert!(give_to(&socket, identity, own).is_err(), "it belongs to another user");
            std::os::unix::fs::chown(&socket, Some(0), None).unwrap();
        }

        fs::rename(&socket, path("moved")).unwrap();
        fs::set_permissions(path("moved"), Permissions::from_mode(0o600)).unwrap();
        symlink(&secret, &socket).unwrap();
        assert!(give_to(&socket, identity, own).is_err());
        fs::remove_file(&socket).unwrap();
        symlink(path("moved"), &socket).unwrap();
        assert!(give_to(&socket, identity, own).is_err(), "a link to it is not it");
        fs::remove_file(&socket).unwrap();
        fs::hard_link(&secret, &socket).unwrap();
        assert!(give_to(&socket, identity, own).is_err());
        fs::remove_file(&socket).unwrap();
        let _other = UnixListener::bind(&socket).unwrap();
        fs::set_permissions(&socket, Permissions::from_mode(0o600)).unwrap();
        assert!(give_to(&socket, identity, own).is_err());
        for name in ["secret", "moved", "socket"] {
            assert_eq!(mode_of(&path(name)), 0o600, "{name}");
        }
        drop(listener);
    }

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!(group_id("root").unwrap(), 0);
        assert_eq!(group_id("4711").unwrap(), 4711);
        for bad in ["no such group", "-1", "", "a\0b"] {
            assert!(group_id(bad).is_err(), "{bad}");
        }
    }
}
