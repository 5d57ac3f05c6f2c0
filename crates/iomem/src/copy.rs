//! Copies from and to memory that may change or be read at any time.

/// A value at any address.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned<T: Copy>(T);

/// Copies from memory that may change at any time. Reads each byte once.
///
/// # Safety
///
/// `src` must be the start of `len` bytes mapped for reading, `dst` of `len` bytes that belong to
/// the caller alone.
#[inline]
pub unsafe fn copy_out(src: *const u8, dst: *mut u8, len: usize) {
    let mut at = 0;
    while at + 8 <= len {
        // SAFETY: at least eight bytes are left of both.
        unsafe { move_out::<u64>(src.add(at), dst.add(at)) };
        at += 8;
    }
    if len & 4 != 0 {
        // SAFETY: bit 2 of `len` is set, so at least four bytes are left after the whole words.
        unsafe { move_out::<u32>(src.add(at), dst.add(at)) };
        at += 4;
    }
    if len & 2 != 0 {
        // SAFETY: as above, for bit 1 and two bytes.
        unsafe { move_out::<u16>(src.add(at), dst.add(at)) };
        at += 2;
    }
    if len & 1 != 0 {
        // SAFETY: as above, for bit 0 and one byte.
        unsafe { move_out::<u8>(src.add(at), dst.add(at)) };
    }
}

/// # Safety
///
/// `src` must be the start of a `T` mapped for reading, `dst` of a `T` that belongs to the caller
/// alone.
#[inline]
unsafe fn move_out<T: Copy>(src: *const u8, dst: *mut u8) {
    // SAFETY: the caller vouches for both, and neither has to be aligned. The access is volatile,
    // so the compiler reads a value once even if it changes in between.
    unsafe { dst.cast::<Unaligned<T>>().write(src.cast::<Unaligned<T>>().read_volatile()) };
}

/// Copies into memory that may be read at any time. A reader may see some of the bytes early. It is
/// certain to see all of them after a release store that announces them, such as the store of used
/// idx.
///
/// # Safety
///
/// `src` must be the start of `len` bytes that do not change, `dst` of `len` bytes mapped for
/// writing.
#[inline]
pub unsafe fn copy_in(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller vouches for both. The target is never read here, so nothing depends on
    // concurrent changes to it.
    unsafe { dst.copy_from_nonoverlapping(src, len) };
}

/// Zeroes memory that may be read at any time, with the visibility of [`copy_in`].
///
/// # Safety
///
/// `dst` must be the start of `len` bytes mapped for writing.
#[inline]
pub(crate) unsafe fn zero(dst: *mut u8, len: usize) {
    const HALF: usize = 64;
    if !(HALF..=2 * HALF).contains(&len) {
        // SAFETY: as in `copy_in`.
        unsafe { dst.write_bytes(0, len) };
        return;
    }
    // Responses of virtio-scsi have such sizes. Two writes, one at each end, avoid a call; they
    // may overlap.
    // SAFETY: as in `copy_in`; both writes are within the bytes, and arrays of bytes need no
    // alignment.
    unsafe {
        dst.cast::<[u8; HALF]>().write([0; HALF]);
        dst.add(len - HALF).cast::<[u8; HALF]>().write([0; HALF]);
    }
}

/// Copies between two ranges that may change at any time. They may overlap: an overlapping byte is
/// copied with its old or its new value.
///
/// # Safety
///
/// `src` must be the start of `len` bytes mapped for reading, `dst` of `len` bytes mapped for
/// writing.
pub(crate) unsafe fn copy_across(mut src: *const u8, mut dst: *mut u8, mut len: usize) {
    // Each byte is read once and written once, even where the ranges overlap.
    let mut between = [0u8; 512];
    while len > 0 {
        let count = len.min(between.len());
        // SAFETY: `count` bytes are left of both, and `between`, a local array, has at least as
        // many.
        unsafe {
            copy_out(src, between.as_mut_ptr(), count);
            copy_in(between.as_ptr(), dst, count);
            (src, dst) = (src.add(count), dst.add(count));
        }
        len -= count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn copies_move_all_bytes_and_no_others(
            data in proptest::collection::vec(1u8.., 0..1200),
            from in 0usize..16, to in 0usize..16,
        ) {
            let mut source = vec![0u8; from];
            source.extend(&data);
            let mut target = vec![0xee_u8; to + data.len() + 16];
            // SAFETY: both vectors have `data.len()` bytes from these offsets on.
            unsafe {
                copy_across(source[from..].as_ptr(), target[to..].as_mut_ptr(), data.len());
            }
            prop_assert_eq!(&target[to..to + data.len()], &data[..]);
            prop_assert!(target[..to].iter().chain(&target[to + data.len()..]).all(|&b| b == 0xee));
            // SAFETY: as above.
            unsafe { zero(target[to..].as_mut_ptr(), data.len()) };
            prop_assert!(target[to..to + data.len()].iter().all(|&byte| byte == 0));
            prop_assert!(target[..to].iter().chain(&target[to + data.len()..]).all(|&b| b == 0xee));
        }
    }
}
