//! User groups by name.

use std::ffi::CString;
use std::io;

use anyhow::{Context, Result, bail};

/// The size of the buffer for an entry of the group list, most of which is for its members.
const ENTRY_BYTES: usize = 1 << 20;

/// Returns the id of the group with this name or number.
///
/// # Errors
///
/// When there is no such group, or the system does not answer.
pub(crate) fn id_of(name: &str) -> Result<u32> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    let c_name = CString::new(name).context("the name of a group must not contain a NUL byte")?;
    let mut entry = std::mem::MaybeUninit::<libc::group>::uninit();
    let mut strings: Vec<libc::c_char> = vec![0; ENTRY_BYTES];
    let mut found = std::ptr::null_mut();
    // SAFETY: the pointers are to live locals, `strings` has the given length, and the name ends
    // with a NUL.
    let error = unsafe {
        libc::getgrnam_r(
            c_name.as_ptr(),
            entry.as_mut_ptr(),
            strings.as_mut_ptr(),
            strings.len(),
            &raw mut found,
        )
    };
    if error != 0 {
        let error = io::Error::from_raw_os_error(error);
        return Err(error).with_context(|| format!("cannot look up the group {name}"));
    }
    if found.is_null() {
        bail!("there is no group {name}; use the name or number of an existing group");
    }
    // SAFETY: the group was found, so the function has filled `entry`.
    Ok(unsafe { entry.assume_init() }.gr_gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!(id_of("root").unwrap(), 0);
        assert_eq!(id_of("4711").unwrap(), 4711);
        for bad in ["no such group", "-1", "", "a\0b"] {
            assert!(id_of(bad).is_err(), "{bad}");
        }
    }
}
