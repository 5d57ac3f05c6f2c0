//! Access to a configuration space of any length (virtio 1.3, section 2.5).

use std::io;
use std::ops::Range;

/// Returns `len` bytes from `offset` on. Bytes beyond the end of `space` read as zeroes.
pub(crate) fn read(space: &[u8], offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    if let Some(rest) = space.get(offset..) {
        let there = rest.len().min(len);
        bytes[..there].copy_from_slice(&rest[..there]);
    }
    bytes
}

/// Returns the parts of `data`, which starts at `offset`, that lie in writable fields, each with
/// its own offset. All other bytes must be equal to `space`.
///
/// # Errors
///
/// When a read-only byte would change.
pub(crate) fn writable_parts<'a>(
    space: &[u8],
    fields: &[Range<usize>],
    offset: usize,
    data: &'a [u8],
) -> io::Result<Vec<(usize, &'a [u8])>> {
    let present = read(space, offset, data.len());
    for (at, (new, old)) in (offset..).zip(data.iter().zip(present)) {
        if *new != old && !fields.iter().any(|field| field.contains(&at)) {
            let text = format!(
                "byte {at} of the configuration space is {old:#x} in this device, not {new:#x}"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
    }
    let end = offset + data.len();
    let common = fields.iter().map(|field| field.start.max(offset)..field.end.min(end));
    let there = common.filter(|part| !part.is_empty());
    Ok(there.map(|part| (part.start, &data[part.start - offset..part.end - offset])).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: [u8; 6] = [1, 2, 3, 4, 5, 6];
    /// Two adjacent fields, as in virtio-scsi.
    const FIELDS: [Range<usize>; 2] = [1..3, 3..4];

    #[test]
    fn bytes_beyond_the_end_read_as_zeroes() {
        for (offset, len, expected) in [
            (0, 2, &[1, 2][..]),
            (5, 3, &[6, 0, 0]),
            (6, 1, &[0]),
            (usize::MAX, 2, &[0, 0]),
            (2, 0, &[]),
        ] {
            assert_eq!(read(&SPACE, offset, len), expected, "{len} bytes at {offset}");
        }
    }

    #[test]
    fn only_fields_that_can_be_written_may_differ() {
        type Parts<'a> = Option<Vec<(usize, &'a [u8])>>;
        let table: [(usize, &[u8], Parts); 7] = [
            (0, &[1, 2, 3, 4, 5, 6], Some(vec![(1, &[2, 3]), (3, &[4])])),
            (0, &[1, 9, 9, 9, 5], Some(vec![(1, &[9, 9]), (3, &[9])])),
            (2, &[9], Some(vec![(2, &[9])])),
            (4, &[5, 6, 0], Some(vec![])),
            (0, &[7], None),
            (3, &[9, 9], None),
            (6, &[1], None),
        ];
        for (offset, data, expected) in table {
            let parts = writable_parts(&SPACE, &FIELDS, offset, data);
            assert_eq!(parts.ok(), expected, "{data:?} at {offset}");
        }
    }
}
