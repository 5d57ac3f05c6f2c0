//! Copies from and to memory that others may be using at the same time.

/// A word that may be anywhere in memory.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned<T: Copy>(T);

/// Copies from memory that others may be writing; reads each byte once.
///
/// # Safety
///
/// `src` must be the start of `len` bytes mapped for reading, `dst` of `len` bytes that belong to
/// the caller alone.
#[inline]
pub unsafe fn copy_out(src: *const u8, dst: *mut u8, len: usize) {
    let mut at = 0;
    while at + 8 <= len {
        // SAFETY: eight bytes are left of both.
        unsafe { move_out::<u64>(src.add(at), dst.add(at)) };
        at += 8;
    }
    if len & 4 != 0 {
        // SAFETY: after whole words, these four are left and those of the lower bits.
        unsafe { move_out::<u32>(src.add(at), dst.add(at)) };
        at += 4;
    }
    if len & 2 != 0 {
        // SAFETY: as above.
        unsafe { move_out::<u16>(src.add(at), dst.add(at)) };
        at += 2;
    }
    if len & 1 != 0 {
        // SAFETY: as above.
        unsafe { move_out::<u8>(src.add(at), dst.add(at)) };
    }
}

/// # Safety
///
/// `src` must be the start of a `T` mapped for reading, `dst` of one that is the caller's alone.
#[inline]
unsafe fn move_out<T: Copy>(src: *const u8, dst: *mut u8) {
    // SAFETY: the caller's promise; neither has to be aligned. The access is volatile, so the
    // compiler reads once what others may change in between.
    unsafe { dst.cast::<Unaligned<T>>().write(src.cast::<Unaligned<T>>().read_volatile()) };
}

/// Copies into memory that others may be reading. They see the bytes for certain after whatever
/// tells them of it, as used idx does, has been stored with release ordering, and some of them
/// perhaps before.
///
/// # Safety
///
/// `src` must be the start of `len` bytes that nobody writes, `dst` of `len` bytes mapped for
/// writing.
#[inline]
pub unsafe fn copy_in(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise. What is written is never read here, so nothing is derived from
    // what others make of it meanwhile.
    unsafe { dst.copy_from_nonoverlapping(src, len) };
}

/// Zeroes memory that others may be reading, as [`copy_in`] would.
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
    // Responses of virtio-scsi have such sizes. Both ends, which may overlap, take no call.
    // SAFETY: as in `copy_in`; both are within the bytes, and arrays of bytes are aligned anywhere.
    unsafe {
        dst.cast::<[u8; HALF]>().write([0; HALF]);
        dst.add(len - HALF).cast::<[u8; HALF]>().write([0; HALF]);
    }
}

/// Copies between memory that others may be using. Both may be parts of the same memory; what
/// overlaps is then copied as it was or as it became.
///
/// # Safety
///
/// `src` must be the start of `len` bytes mapped for reading, `dst` of `len` bytes mapped for
/// writing.
pub(crate) unsafe fn copy_across(mut src: *const u8, mut dst: *mut u8, mut len: usize) {
    // Each byte is read once and written once, whatever overlaps.
    let mut between = [0u8; 512];
    while len > 0 {
        let count = len.min(between.len());
        // SAFETY: `count` bytes are left of both, and `between`, which is ours, has as many.
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
            // SAFETY: both vectors have `data.len()` bytes behind these places.
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
