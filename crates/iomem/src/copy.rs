//! Copies from and to memory that others may be using at the same time.

/// Copies from memory that others may be writing; reads each byte once, and in pieces as large as
/// alignment allows, up to a word.
///
/// # Safety
///
/// `src` must be the start of `len` bytes mapped for reading, `dst` of `len` bytes that belong to
/// the caller alone.
#[inline]
pub unsafe fn copy_out(src: *const u8, dst: *mut u8, len: usize) {
    let [head, words] = cut(src.addr(), len);
    if head > 0 {
        // SAFETY: the caller's promises hold for a part.
        unsafe { copy_out_rest(src, dst, head) };
    }
    for word in 0..words {
        let at = head + word * 8;
        let (src, dst) = (src.wrapping_add(at), dst.wrapping_add(at));
        // SAFETY: eight bytes are left of both, and `src` is aligned to that.
        unsafe { dst.cast::<u64>().write_unaligned(src.cast::<u64>().read_volatile()) };
    }
    let done = head + words * 8;
    if done < len {
        // SAFETY: the caller's promises hold for a part.
        unsafe { copy_out_rest(src.wrapping_add(done), dst.wrapping_add(done), len - done) };
    }
}

/// See [`copy_out`].
unsafe fn copy_out_rest(mut src: *const u8, mut dst: *mut u8, mut len: usize) {
    while len > 0 {
        let count = piece(src.addr(), len);
        // SAFETY: `count` bytes are left of both, and `src` is aligned to `count`. Both pointers
        // advance by what was copied.
        unsafe {
            match count {
                8 => dst.cast::<u64>().write_unaligned(src.cast::<u64>().read_volatile()),
                4 => dst.cast::<u32>().write_unaligned(src.cast::<u32>().read_volatile()),
                2 => dst.cast::<u16>().write_unaligned(src.cast::<u16>().read_volatile()),
                _ => dst.write(src.read_volatile()),
            }
            (src, dst) = (src.add(count), dst.add(count));
        }
        len -= count;
    }
}

/// Copies into memory that others may be reading; writes each byte once, and in pieces as large as
/// alignment allows, up to a word.
///
/// # Safety
///
/// `src` must be the start of `len` bytes that nobody writes, `dst` of `len` bytes mapped for
/// writing.
#[inline]
pub unsafe fn copy_in(src: *const u8, dst: *mut u8, len: usize) {
    let [head, words] = cut(dst.addr(), len);
    if head > 0 {
        // SAFETY: the caller's promises hold for a part.
        unsafe { copy_in_rest(src, dst, head) };
    }
    for word in 0..words {
        let at = head + word * 8;
        let (src, dst) = (src.wrapping_add(at), dst.wrapping_add(at));
        // SAFETY: eight bytes are left of both, and `dst` is aligned to that.
        unsafe { dst.cast::<u64>().write_volatile(src.cast::<u64>().read_unaligned()) };
    }
    let done = head + words * 8;
    if done < len {
        // SAFETY: the caller's promises hold for a part.
        unsafe { copy_in_rest(src.wrapping_add(done), dst.wrapping_add(done), len - done) };
    }
}

/// See [`copy_in`].
unsafe fn copy_in_rest(mut src: *const u8, mut dst: *mut u8, mut len: usize) {
    while len > 0 {
        let count = piece(dst.addr(), len);
        // SAFETY: as in `copy_out_rest`, the other way round.
        unsafe {
            match count {
                8 => dst.cast::<u64>().write_volatile(src.cast::<u64>().read_unaligned()),
                4 => dst.cast::<u32>().write_volatile(src.cast::<u32>().read_unaligned()),
                2 => dst.cast::<u16>().write_volatile(src.cast::<u16>().read_unaligned()),
                _ => dst.write_volatile(src.read()),
            }
            (src, dst) = (src.add(count), dst.add(count));
        }
        len -= count;
    }
}

/// Zeroes memory that others may be reading.
///
/// # Safety
///
/// `dst` must be the start of `len` bytes mapped for writing.
#[inline]
pub(crate) unsafe fn zero(dst: *mut u8, len: usize) {
    let [head, words] = cut(dst.addr(), len);
    if head > 0 {
        // SAFETY: the caller's promise holds for a part.
        unsafe { zero_rest(dst, head) };
    }
    for word in 0..words {
        // SAFETY: eight bytes are left, and `dst` is aligned to that.
        unsafe { dst.wrapping_add(head + word * 8).cast::<u64>().write_volatile(0) };
    }
    let done = head + words * 8;
    if done < len {
        // SAFETY: the caller's promise holds for a part.
        unsafe { zero_rest(dst.wrapping_add(done), len - done) };
    }
}

/// See [`zero`].
unsafe fn zero_rest(mut dst: *mut u8, mut len: usize) {
    while len > 0 {
        let count = piece(dst.addr(), len);
        // SAFETY: `count` bytes are left, and `dst` is aligned to `count`.
        unsafe {
            match count {
                8 => dst.cast::<u64>().write_volatile(0),
                4 => dst.cast::<u32>().write_volatile(0),
                2 => dst.cast::<u16>().write_volatile(0),
                _ => dst.write_volatile(0),
            }
            dst = dst.add(count);
        }
        len -= count;
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
    // Two addresses seldom have an alignment in common, but each has one with memory of our own.
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

/// The bytes before the first aligned word of `len` bytes at an address, and how many such words
/// follow.
#[inline]
fn cut(addr: usize, len: usize) -> [usize; 2] {
    let head = (addr.wrapping_neg() & 7).min(len);
    [head, (len - head) / 8]
}

/// The bytes to copy at once at an address of shared memory, of `len` that are left.
#[inline]
fn piece(addr: usize, len: usize) -> usize {
    [8, 4, 2].into_iter().find(|&size| len >= size && addr.is_multiple_of(size)).unwrap_or(1)
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
