//! The headers of version 2 (LUKS2 On-Disk Format Specification 1.1.2): a binary one with a
//! checksum, JSON behind it, and a copy of both.

use std::collections::BTreeMap;

use argon2::Algorithm;
use base64ct::{Base64, Encoding};
use serde::Deserialize;
use serde_json::Value;

use super::hash::Hash;
use super::header::{
    Header, Kdf, KeyCheck, MAGIC, Payload, ReadAt, SLOTS_MAX, STRIPES_MAX, Slot, check_cipher,
    check_key_bytes, overlap, parse_text,
};

/// The start of the copy of a header.
const COPY_MAGIC: [u8; 6] = *b"SKUL\xba\xbe";
/// Bytes of the binary header.
pub(super) const BINARY_BYTES: usize = 4096;
const CHECKSUM: std::ops::Range<usize> = 448..512;
/// Powers of two: the possible sizes of a header with its JSON, and so places of its copy, from 16
/// KiB to 4 MiB.
const SIZES: std::ops::RangeInclusive<u32> = 14..=22;
/// A higher position of a sector, near the end of the number range, is a mistake.
const POSITION_MAX: u64 = 1 << 60;

/// The advice for a header that is missing or damaged. A new one would destroy all keys, and with
/// them the data.
const CHECK_DISK: &str = "check that this is the right disk; name a detached header with \
                          `header=`; restore a damaged header from a backup with `cryptsetup \
                          luksHeaderRestore`";

/// Reads the first header, or its copy if that is newer or the first header is damaged.
pub(super) fn read(read: &ReadAt<'_>, is_detached: bool) -> Result<Header, String> {
    let first = Binary::read(read, 0, MAGIC);
    // An intact first header states the place of its copy. A damaged one is not believed.
    let places: Vec<u64> = match &first {
        Ok(first) => vec![first.bytes],
        Err(_) => SIZES.map(|power| 1 << power).collect(),
    };
    let copies = places.iter().map(|&place| Binary::read(read, place, COPY_MAGIC));
    let mut why = None;
    let mut copy = None;
    for found in copies {
        match found {
            Ok(found) => copy = copy.or(Some(found)),
            Err(reason) => why = why.or(Some(reason)),
        }
    }
    let (header, remark) = match (first, copy) {
        (Ok(first), Some(copy)) if copy.sequence > first.sequence => {
            (copy, Some("the copy of its header is newer than its header".to_owned()))
        }
        (Ok(first), Some(_)) => (first, None),
        (Ok(first), None) => {
            (first, why.map(|why| format!("the copy of its header is damaged: {why}")))
        }
        (Err(why), Some(copy)) => {
            (copy, Some(format!("its header is damaged, and its copy is used: {why}")))
        }
        (Err(why), None) => return Err(format!("{why}; {CHECK_DISK}")),
    };
    let remark = remark.map(|remark| format!("{remark}; repair it with `cryptsetup repair`"));
    parse(&header, is_detached).map(|parsed| Header { remark, ..parsed })
}

/// A binary header with a correct checksum, and its JSON.
struct Binary {
    /// The size of the header with its JSON.
    bytes: u64,
    sequence: u64,
    uuid: String,
    json: Vec<u8>,
}

impl Binary {
    fn read(read: &ReadAt<'_>, place: u64, magic: [u8; 6]) -> Result<Self, String> {
        let start = read(place, BINARY_BYTES)?;
        let number = |at: usize| {
            start[at..at + 8].iter().fold(0, |number: u64, byte| number << 8 | u64::from(*byte))
        };
        if start[..6] != magic {
            return Err(format!("there is no LUKS header at byte {place}"));
        }
        let version = u16::from_be_bytes([start[6], start[7]]);
        if version != 2 {
            return Err(format!(
                "the LUKS version {version} of the header at byte {place} is not supported; \
                 versions 1 and 2 are"
            ));
        }
        let (bytes, sequence) = (number(8), number(16));
        if !SIZES.map(|power| 1 << power).any(|size: u64| size == bytes) {
            return Err(format!("the header at byte {place} has the invalid size {bytes}"));
        }
        if number(256) != place {
            return Err(format!("the header at byte {place} belongs at {}", number(256)));
        }
        let hash = Hash::from_name(parse_text(&start[72..104])?)?;
        let whole = usize::try_from(bytes).map_err(|_| "its header is too large".to_owned())?;
        let all = read(place, whole)?;
        let (before, behind) = (&all[..CHECKSUM.start], &all[CHECKSUM.end..]);
        let checksum = hash.digest(&[before, &[0; CHECKSUM.end - CHECKSUM.start], behind]);
        if all[CHECKSUM][..hash.bytes()] != checksum[..] {
            return Err(format!("the checksum of the header at byte {place} is wrong"));
        }
        let json = all[BINARY_BYTES..].split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
        Ok(Self { bytes, sequence, uuid: parse_text(&start[168..208])?.to_owned(), json })
    }
}

/// The JSON of a header, as far as it is needed. Unknown values that decide how data is read are
/// errors.
#[derive(Deserialize)]
struct Metadata {
    keyslots: BTreeMap<u32, Value>,
    segments: BTreeMap<u32, Segment>,
    digests: BTreeMap<u32, Digest>,
    config: Config,
}

#[derive(Deserialize)]
struct Keyslot {
    key_size: u64,
    priority: Option<u32>,
    af: Af,
    area: Area,
    kdf: KdfFields,
}

#[derive(Deserialize)]
struct Af {
    r#type: String,
    stripes: u32,
    hash: String,
}

#[derive(Deserialize)]
struct Area {
    r#type: String,
    offset: String,
    size: String,
    encryption: String,
    key_size: u64,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum KdfFields {
    Pbkdf2 { hash: String, iterations: u32, salt: String },
    Argon2i { time: u32, memory: u32, cpus: u32, salt: String },
    Argon2id { time: u32, memory: u32, cpus: u32, salt: String },
}

#[derive(Deserialize)]
struct Segment {
    r#type: String,
    offset: String,
    size: String,
    #[serde(default)]
    iv_tweak: Option<String>,
    #[serde(default)]
    encryption: String,
    #[serde(default)]
    sector_size: u32,
    integrity: Option<Value>,
    #[serde(default)]
    flags: Vec<String>,
}

#[derive(Deserialize)]
struct Digest {
    r#type: String,
    keyslots: Vec<String>,
    segments: Vec<String>,
    hash: String,
    iterations: u32,
    salt: String,
    digest: String,
}

#[derive(Deserialize)]
struct Config {
    requirements: Option<Requirements>,
}

#[derive(Deserialize)]
struct Requirements {
    #[serde(default)]
    mandatory: Vec<String>,
}

fn parse(header: &Binary, is_detached: bool) -> Result<Header, String> {
    let metadata: Metadata = serde_json::from_slice(&header.json)
        .map_err(|error| format!("cannot parse the JSON in its header: {error}"))?;
    let requirements = metadata.config.requirements.map_or(Vec::new(), |needs| needs.mandatory);
    if !requirements.is_empty() {
        return Err(format!(
            "it requires {requirements:?}, which is not supported; if its re-encryption is not \
             complete, complete it with `cryptsetup reencrypt --resume-only`"
        ));
    }
    let mut segments = metadata.segments.iter();
    let (Some((name, segment)), None) = (segments.next(), segments.next()) else {
        return Err(format!("it has {} segments instead of one", metadata.segments.len()));
    };
    let name = name.to_string();
    let payload = segment.payload()?;
    let mut digests = metadata.digests.values();
    let digest = digests.find(|digest| digest.segments.contains(&name));
    let digest = digest.ok_or("its header has no digest that verifies the key of its data")?;
    let check = digest.check()?;
    if metadata.keyslots.len() > SLOTS_MAX {
        let slots = metadata.keyslots.len();
        return Err(format!("it has {slots} key slots, and at most {SLOTS_MAX} are allowed"));
    }
    let headers_end = 2 * header.bytes;
    let areas =
        metadata.keyslots.iter().map(|(&number, keyslot)| check_area(header, number, keyslot));
    let end = areas.collect::<Result<Vec<_>, _>>()?.into_iter().max().unwrap_or(headers_end);
    if !is_detached && payload.offset_bytes < end {
        return Err(overlap(payload.offset_bytes, end));
    }
    let (slots, skipped) = key_slots(&metadata.keyslots, digest, &check);
    Ok(Header { version: 2, uuid: header.uuid.clone(), payload, slots, skipped, remark: None })
}

/// Returns the end of the area of a key slot, if it is known, even for an unsupported slot: data
/// must not be written over it.
fn check_area(header: &Binary, number: u32, keyslot: &Value) -> Result<u64, String> {
    let headers_end = 2 * header.bytes;
    let field = |key| keyslot.get("area")?.get(key)?.as_str()?.parse::<u64>().ok();
    let (Some(offset), Some(bytes)) = (field("offset"), field("size")) else {
        return Ok(headers_end);
    };
    if offset < headers_end {
        return Err(format!(
            "the area of its key slot {number} begins at {offset}, inside the header"
        ));
    }
    Ok(offset.saturating_add(bytes))
}

/// Returns the key slots that can be tried, in their order, and the reasons against the rest.
fn key_slots(
    keyslots: &BTreeMap<u32, Value>,
    digest: &Digest,
    check: &KeyCheck,
) -> (Vec<Slot>, String) {
    let (mut slots, mut skipped) = (Vec::new(), String::new());
    for (&number, value) in keyslots {
        let is_known = value.get("type").and_then(Value::as_str) == Some("luks2");
        if !is_known || !digest.keyslots.contains(&number.to_string()) {
            continue;
        }
        let parsed = Keyslot::deserialize(value).map_err(|error| error.to_string());
        let slot = parsed.and_then(|keyslot| {
            let slot = keyslot.slot(number, check.clone())?;
            Ok((keyslot.priority.unwrap_or(1), slot))
        });
        match slot {
            // Priority 0: the slot is used only on request, and no option requests one.
            Ok((0, _)) => {}
            Ok(slot) => slots.push(slot),
            Err(why) => skipped += &format!("; key slot {number} cannot be used: {why}"),
        }
    }
    // The sort is stable: slots of one priority stay in the order of their numbers.
    slots.sort_by_key(|(priority, _)| std::cmp::Reverse(*priority));
    (slots.into_iter().map(|(_, slot)| slot).collect(), skipped)
}

impl Segment {
    fn payload(&self) -> Result<Payload, String> {
        let Self { r#type, integrity, encryption, sector_size, .. } = self;
        if r#type != "crypt" || integrity.is_some() {
            let with = if integrity.is_some() { " with integrity" } else { "" };
            return Err(format!("its data is of type {type:?}{with}, which is not supported"));
        }
        if !self.flags.is_empty() {
            let flags = &self.flags;
            return Err(format!("its data has the flags {flags:?}, which are not supported"));
        }
        check_cipher(encryption)?;
        if ![512, 1024, 2048, 4096].contains(sector_size) {
            return Err(format!("its sectors have the invalid size of {sector_size} bytes"));
        }
        let first_position = self.iv_tweak.as_deref().map_or(Ok(0), bytes_of)?;
        if first_position > POSITION_MAX {
            return Err(format!("its data begins with the invalid sector {first_position}"));
        }
        Ok(Payload {
            offset_bytes: bytes_of(&self.offset)?,
            size_bytes: match &*self.size {
                "dynamic" => None,
                size => Some(bytes_of(size)?),
            },
            sector_bytes: *sector_size,
            first_position,
        })
    }
}

impl Digest {
    fn check(&self) -> Result<KeyCheck, String> {
        if self.r#type != "pbkdf2" {
            return Err(format!("its digest is of type {:?}, which is not supported", self.r#type));
        }
        let digest = parse_base64(&self.digest)?;
        // Every key would match a digest of no bytes.
        if !(16..=64).contains(&digest.len()) {
            return Err(format!("its digest has the invalid length of {} bytes", digest.len()));
        }
        let hash = Hash::from_name(&self.hash)?;
        Ok(KeyCheck { hash, rounds: self.iterations, salt: parse_base64(&self.salt)?, digest })
    }
}

impl Keyslot {
    fn slot(&self, number: u32, check: KeyCheck) -> Result<Slot, String> {
        let Self { af, area, kdf, .. } = self;
        if af.r#type != "luks1" || area.r#type != "raw" {
            let (af, area) = (&af.r#type, &area.r#type);
            return Err(format!("types {af:?} and {area:?} are not supported"));
        }
        check_cipher(&area.encryption)?;
        if !(1..=STRIPES_MAX).contains(&af.stripes) {
            return Err(format!("it has {} stripes instead of 4000", af.stripes));
        }
        let slot = Slot {
            number,
            kdf: kdf.kdf()?,
            slot_key_bytes: check_key_bytes(area.key_size)?,
            area_offset: bytes_of(&area.offset)?,
            stripes: af.stripes,
            split_hash: Hash::from_name(&af.hash)?,
            key_bytes: check_key_bytes(self.key_size)?,
            check,
        };
        let (needed, size) = (slot.area_bytes(), bytes_of(&area.size)?);
        match needed <= size {
            true => Ok(slot),
            false => Err(format!("its area has {size} bytes, and the key needs {needed}")),
        }
    }
}

impl KdfFields {
    fn kdf(&self) -> Result<Kdf, String> {
        let argon2 = |algorithm, &passes: &u32, &kib: &u32, &lanes: &u32, salt: &str| {
            Ok(Kdf::Argon2 { algorithm, passes, kib, lanes, salt: parse_base64(salt)? })
        };
        match self {
            Self::Pbkdf2 { hash, iterations, salt } => {
                let hash = Hash::from_name(hash)?;
                Ok(Kdf::Pbkdf2 { hash, rounds: *iterations, salt: parse_base64(salt)? })
            }
            Self::Argon2i { time, memory, cpus, salt } => {
                argon2(Algorithm::Argon2i, time, memory, cpus, salt)
            }
            Self::Argon2id { time, memory, cpus, salt } => {
                argon2(Algorithm::Argon2id, time, memory, cpus, salt)
            }
        }
    }
}

/// Parses a number that is written as a text.
fn bytes_of(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text:?} in its header is not a number"))
}

fn parse_base64(text: &str) -> Result<Vec<u8>, String> {
    Base64::decode_vec(text).map_err(|_| format!("{text:?} in its header is not Base64"))
}
