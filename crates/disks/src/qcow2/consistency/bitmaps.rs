//! The list of bitmaps of an image: their names, and the places of their tables.

use std::ops::Range;

/// The most bytes of a list that are read.
pub(crate) const LIST_BYTES_MAX: u64 = 1 << 20;

/// Bytes of an entry before its extra data and its name.
const FIXED_BYTES: usize = 24;

/// A bitmap of a backup program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Bitmap {
    /// Without control characters, since the image may come from any source.
    pub(crate) name: String,
    pub(crate) table: Range<u64>,
}

/// Parses the bitmaps of a list. `None` if the list is damaged.
pub(crate) fn parse(mut list: &[u8]) -> Option<Vec<Bitmap>> {
    let mut bitmaps = Vec::new();
    while !list.is_empty() {
        let number = |range: Range<usize>| -> Option<u64> {
            let bytes = list.get(range)?;
            Some(bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
        };
        let (start, entries) = (number(0..8)?, number(8..12)?);
        let (name, extra) = (number(18..20)?, number(20..24)?);
        let start_of_name = FIXED_BYTES.checked_add(usize::try_from(extra).ok()?)?;
        let end = start_of_name.checked_add(usize::try_from(name).ok()?)?;
        let name = String::from_utf8_lossy(list.get(start_of_name..end)?);
        bitmaps.push(Bitmap {
            name: name.chars().filter(|character| !character.is_control()).collect(),
            table: start..start.checked_add(entries * 8)?,
        });
        list = list.get(end.next_multiple_of(8)..)?;
    }
    Some(bitmaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, extra: usize) -> Vec<u8> {
        let mut entry = vec![0; FIXED_BYTES + extra];
        entry[..8].copy_from_slice(&(1u64 << 20).to_be_bytes());
        entry[11] = 3;
        entry[19] = iomem::fits(name.len() as u64, "a name");
        entry[23] = iomem::fits(extra as u64, "extra data");
        entry.extend(name.as_bytes());
        entry.resize(entry.len().next_multiple_of(8), 0);
        entry
    }

    #[test]
    fn a_list_is_read_to_its_end() {
        let list = [entry("one", 0), entry("tw\no", 5)].concat();
        let table = 1 << 20..(1 << 20) + 24;
        let expected =
            ["one", "two"].map(|name| Bitmap { name: name.to_owned(), table: table.clone() });
        assert_eq!(parse(&list).unwrap(), expected);
        for len in 1..list.len() {
            let is_whole = len == entry("one", 0).len();
            assert_eq!(parse(&list[..len]).is_some(), is_whole, "{len}");
        }
        let mut damaged = entry("one", 0);
        damaged[20] = 0xff;
        assert_eq!(parse(&damaged), None);
    }
}
