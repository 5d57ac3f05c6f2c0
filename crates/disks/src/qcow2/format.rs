//! An image as imago opens it.

use std::io;
use std::ops::Range;

use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{FormatAccess, Mapping};

use super::core::{Core, Layer};
use super::storage::Store;

pub(super) type Format = FormatAccess<Store>;

/// Returns true if `test` accepts any mapping of a range.
pub(super) async fn has_any(
    image: &Format,
    range: &Range<u64>,
    test: impl Fn(&Mapping<'_, Store>) -> bool,
) -> io::Result<bool> {
    let mut at = range.start;
    while at < range.end {
        let (mapping, len) = image.get_mapping(at, range.end - at).await?;
        if test(&mapping) {
            return Ok(true);
        }
        assert!(len > 0, "the disk ends before its size");
        at += len;
    }
    Ok(false)
}

/// Opens an image from the bottom up.
pub(super) async fn open(core: &Core) -> io::Result<Format> {
    let mut below: Option<Format> = None;
    for (index, Layer { source, header }) in core.layers.iter().enumerate().rev() {
        let on = (source.clone(), header.as_ref());
        let store = Store::new(index, on, &core.order, &core.cache_limit);
        store.adopt_file_size().map_err(io::Error::other)?;
        let opened = match header {
            None => FormatAccess::new(Raw::open_image(store, false).await?),
            Some(_) => {
                let is_writable = index == 0 && core.is_writable();
                if is_writable {
                    core.top.load_mark(core.may_be_marked, core.leaked.is_some()).await?;
                }
                let mut image = Qcow2::<Store>::open_image(store, is_writable).await?;
                image.set_data_file(None);
                image.set_backing(below.take());
                if is_writable {
                    core.top.load_tables().await?;
                }
                FormatAccess::new(image)
            }
        };
        below = Some(opened);
    }
    below.ok_or_else(|| io::Error::other("an image without layers"))
}
