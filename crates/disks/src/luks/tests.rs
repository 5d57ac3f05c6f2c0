//! Headers as from other programs, good and bad. Real headers of `cryptsetup` and QEMU are tested
//! with the daemon.

mod data;

use base64ct::{Base64, Encoding};
use blockio::DiskOptions;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use super::hash::Hash;
use super::header::MAGIC;
use super::xts::{Cipher, Direction};
use super::*;

const HEADER_BYTES: usize = 16_384;
const AREA_OFFSET: usize = 32_768;
/// The start of the data.
pub(crate) const DATA_OFFSET: u64 = 65_536;
const STRIPES: usize = 3;
pub(crate) const PASSPHRASE: &[u8] = b"passphrase";
const MIB: u64 = 1 << 20;

fn volume_key() -> Vec<u8> {
    (1..=64).collect()
}

/// Everything before the data of an image of version 2, with a JSON that `change` may change.
pub(crate) fn header(change: impl Fn(&mut Value)) -> Vec<u8> {
    let (salt, hash) = ([7; 32], Hash::Sha256);
    let key = volume_key();
    let digest = hash.pbkdf2(&key, &salt, 1, 32);
    let [salt_text, digest] = [&salt[..], &digest].map(Base64::encode_string);
    let mut metadata = json!({
        "keyslots": { "0": {
            "type": "luks2", "key_size": 64,
            "af": { "type": "luks1", "stripes": STRIPES, "hash": "sha256" },
            "area": { "type": "raw", "offset": AREA_OFFSET.to_string(), "size": "4096",
                "encryption": "aes-xts-plain64", "key_size": 64 },
            "kdf": { "type": "pbkdf2", "hash": "sha256", "iterations": 1, "salt": salt_text },
        } },
        "tokens": {},
        "segments": { "0": {
            "type": "crypt", "offset": DATA_OFFSET.to_string(), "size": "dynamic",
            "iv_tweak": "0", "encryption": "aes-xts-plain64", "sector_size": 512,
        } },
        "digests": { "0": {
            "type": "pbkdf2", "keyslots": ["0"], "segments": ["0"], "hash": "sha256",
            "iterations": 1, "salt": salt_text, "digest": digest,
        } },
        "config": { "json_size": "12288", "keyslots_size": "16384" },
    });
    change(&mut metadata);
    let mut all = binary(&metadata, false, 1);
    all.extend(binary(&metadata, true, 1));
    all.resize(usize::try_from(DATA_OFFSET).unwrap(), 0);
    // All stripes but the last one are zeroes.
    let mut material = hash.merge(&[0; STRIPES * 64], 64).to_vec();
    material.iter_mut().zip(&key).for_each(|(byte, with)| *byte ^= with);
    let area = &mut all[AREA_OFFSET..AREA_OFFSET + 512];
    area[(STRIPES - 1) * 64..STRIPES * 64].copy_from_slice(&material);
    let slot_key = Cipher::new(&hash.pbkdf2(PASSPHRASE, &salt, 1, 64)).unwrap();
    slot_key.run(Direction::Encrypt, area, 512, 0);
    all
}

fn binary(metadata: &Value, is_copy: bool, sequence: u64) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    let place = if is_copy { HEADER_BYTES as u64 } else { 0 };
    bytes[..6].copy_from_slice(if is_copy { b"SKUL\xba\xbe" } else { &MAGIC });
    bytes[7] = 2;
    bytes[8..16].copy_from_slice(&(HEADER_BYTES as u64).to_be_bytes());
    bytes[16..24].copy_from_slice(&sequence.to_be_bytes());
    bytes[72..78].copy_from_slice(b"sha256");
    bytes[168..172].copy_from_slice(b"uuid");
    bytes[256..264].copy_from_slice(&place.to_be_bytes());
    let json = metadata.to_string();
    bytes[4096..4096 + json.len()].copy_from_slice(json.as_bytes());
    seal(&mut bytes);
    bytes
}

/// Corrects the checksum.
fn seal(header: &mut [u8]) {
    header[448..512].fill(0);
    let checksum = Hash::Sha256.digest(&[header]);
    header[448..480].copy_from_slice(&checksum);
}

pub(crate) fn options(discard: bool) -> LuksOptions {
    let passphrase = Passphrase::read(PASSPHRASE).unwrap();
    LuksOptions { passphrase, discard, header: None, most_work: KdfLimits::default() }
}

/// A file that begins with these bytes.
pub(crate) fn image(start: &[u8], bytes: u64) -> NamedTempFile {
    let file = NamedTempFile::new_in(blockio::testing::disk_folder()).unwrap();
    std::fs::write(file.path(), start).unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

fn below(file: &NamedTempFile) -> DiskSource {
    let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
    DiskSource::file(file.path(), &options).unwrap()
}

fn open(start: &[u8]) -> Result<DiskSource, String> {
    let file = image(start, MIB);
    crate::luks::open(below(&file), &options(false)).map_err(|error| error.to_string())
}

#[track_caller]
fn check_refused(start: &[u8], expected: &str) {
    let error = open(start).expect_err(expected);
    assert!(error.contains(expected) && !error.contains('\n'), "no {expected:?} in: {error}");
}

/// Sets a value of a header, which may be new.
fn set_value(metadata: &mut Value, place: &str, value: Value) {
    match (metadata.pointer(place), place.rsplit_once('/')) {
        (None, Some((parent, key))) => metadata.pointer_mut(parent).unwrap()[key] = value,
        _ => *metadata.pointer_mut(place).unwrap() = value,
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_header_with_forbidden_values_is_refused() {
    let big = "18446744073709551615";
    let argon2 = |kib: u64, passes: u64, lanes: u64| {
        json!({ "type": "argon2id", "time": passes, "memory": kib, "cpus": lanes, "salt":
            "BwcHBwcHBwcHBwcHBwcHBw==" })
    };
    for (place, value, expected) in [
        ("/segments/0/encryption", json!("aes-cbc-essiv:sha256"), "--cipher aes-xts-plain64`"),
        ("/segments/0/encryption", json!("a\nb"), "\"a\\nb\" is not supported"),
        ("/segments/0/type", json!("linear"), "of type \"linear\""),
        ("/segments/0/type", json!("a\u{7}b"), "of type \"a\\u{7}b\""),
        ("/segments/0/sector_size", json!(100), "sectors have the invalid size of 100 bytes"),
        ("/segments/0/sector_size", json!(8192), "sectors have the invalid size of 8192 bytes"),
        ("/segments/0/offset", json!("0"), "its data begins at byte 0"),
        ("/segments/0/offset", json!("-1"), "\"-1\" in its header is not a number"),
        ("/segments/0/offset", json!("66000"), "is not a multiple of the logical block"),
        ("/segments/0/offset", json!(big), "the disk ends at 1048576: the disk was truncated"),
        (
            "/segments/0/offset",
            json!("1048576"),
            "the disk ends at 1048576: the disk was truncated",
        ),
        ("/segments/0/size", json!("1073741824"), "and has 1073741824 bytes, and the disk ends"),
        ("/segments/0/size", json!(big), "the disk ends at 1048576: the disk was truncated"),
        ("/segments/0/size", json!("0"), "choose a smaller offset or size"),
        ("/segments/0/flags", json!(["backup-moved-segment"]), "the flags [\"backup-moved-segment"),
        ("/segments/0/integrity", json!({ "type": "hmac(sha256)" }), "\"crypt\" with integrity"),
        ("/segments/0/iv_tweak", json!(big), "begins with the invalid sector 18446744073709551615"),
        ("/segments/0", json!({ "type": "crypt" }), "missing field `offset`"),
        ("/segments", json!({}), "it has 0 segments"),
        (
            "/segments/1",
            json!({ "type": "linear", "offset": "0", "size": "512" }),
            "it has 2 segments instead of one",
        ),
        ("/config", json!({ "requirements": { "mandatory": ["x"] } }), "--resume-only"),
        ("/keyslots/0/kdf/iterations", json!(u32::MAX), "rounds of PBKDF2"),
        ("/keyslots/0/kdf/iterations", json!(0), "rounds of PBKDF2"),
        ("/keyslots/0/kdf", argon2(1 << 21, 1, 1), "asks for 2097152 KiB of memory"),
        ("/keyslots/0/kdf", argon2(1 << 19, 1 << 20, 1), "and 1048576 passes"),
        ("/keyslots/0/kdf", argon2(0, 1, 1), "key slot 0 cannot be used"),
        ("/keyslots/0/kdf", argon2(64, 1, 1 << 30), "key slot 0 cannot be used"),
        ("/keyslots/0/kdf/type", json!("scrypt"), "unknown variant `scrypt`"),
        ("/keyslots/0/kdf/salt", json!("?"), "is not Base64"),
        ("/keyslots/0/kdf/hash", json!("md5"), "its hash \"md5\""),
        ("/keyslots/0/af/stripes", json!(0), "it has 0 stripes"),
        ("/keyslots/0/af/stripes", json!(1 << 30), "it has 1073741824 stripes"),
        ("/keyslots/0/area/offset", json!("4096"), "area of its key slot 0 begins at 4096"),
        ("/keyslots/0/area/offset", json!("28672"), "area of its key slot 0 begins at 28672"),
        ("/keyslots/0/area/offset", json!(big), "and its header ends only at"),
        ("/keyslots/0/area/size", json!("1"), "its area has 1 bytes"),
        ("/keyslots/0/key_size", json!(48), "its keys have 48 bytes"),
        ("/keyslots/0/area/key_size", json!(0), "its keys have 0 bytes"),
        ("/keyslots/0/type", json!("reencrypt"), "no usable key slot"),
        ("/keyslots/0/priority", json!(0), "no usable key slot"),
        ("/digests/0/keyslots", json!([]), "no usable key slot"),
        ("/digests/0/segments", json!([]), "no digest that verifies the key"),
        ("/digests/0/digest", json!(""), "its digest has the invalid length of 0 bytes"),
        ("/digests/0/iterations", json!(u32::MAX), "rounds of PBKDF2"),
        ("/digests/0/type", json!("argon2"), "its digest is of type \"argon2\", which is not"),
        ("/keyslots/0/af/type", json!("none"), "types \"none\" and \"raw\" are not supported"),
        ("/keyslots/0/area/type", json!("x"), "types \"luks1\" and \"x\" are not supported"),
        ("/digests/0/salt", json!("AAAA"), "opens none of the 1 key slots"),
        ("", json!("text"), "cannot parse the JSON in its header"),
    ] {
        let start = header(|metadata| set_value(metadata, place, value.clone()));
        check_refused(&start, expected);
    }
}

/// The area of a slot has the key of the disk in stripes, and may be encrypted with a shorter key.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_key_of_a_slot_may_be_shorter_than_that_of_the_disk() {
    let mut start = header(|metadata| metadata["keyslots"]["0"]["area"]["key_size"] = json!(32));
    let area = &mut start[AREA_OFFSET..AREA_OFFSET + 512];
    for (direction, bytes) in [(Direction::Decrypt, 64), (Direction::Encrypt, 32)] {
        let slot_key = Cipher::new(&Hash::Sha256.pbkdf2(PASSPHRASE, &[7; 32], 1, bytes)).unwrap();
        slot_key.run(direction, area, 512, 0);
    }
    let source = open(&start).unwrap();
    assert_eq!(source.info().size_bytes, MIB - DATA_OFFSET);
}

/// The error names the layer, since several may lie over one file.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_refusal_names_the_layer_and_the_disk_below() {
    let file = image(&[0; 4096], MIB);
    let error = crate::luks::open(below(&file), &options(false)).unwrap_err().to_string();
    assert!(error.contains(&format!("LUKS on {}", below(&file).chain_text())), "{error}");
}

/// The first slot opens the disk, with any use of the second one.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_unsupported_key_slot_does_not_keep_another_slot_from_opening_the_disk() {
    let with_second = |place: &str, value: Value| {
        header(|metadata| {
            let mut second = metadata["keyslots"]["0"].clone();
            second["area"]["offset"] = json!((AREA_OFFSET + 4096).to_string());
            *second.pointer_mut(place).unwrap() = value.clone();
            metadata["keyslots"]["1"] = second;
            metadata["digests"]["0"]["keyslots"] = json!(["0", "1"]);
        })
    };
    for (place, value, why) in [
        ("/kdf", json!({ "type": "scrypt" }), "unknown variant `scrypt`"),
        ("/area/encryption", json!("serpent-xts-plain64"), "\"serpent-xts-plain64\""),
        ("/af/hash", json!("blake2b"), "its hash \"blake2b\""),
        ("/af", json!(7), "invalid type"),
    ] {
        let start = with_second(place, value);
        open(&start).unwrap();
        let passphrase = Passphrase::read(&b"another"[..]).unwrap();
        let options = LuksOptions { passphrase, ..options(false) };
        let refused = crate::luks::open(below(&image(&start, MIB)), &options).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains("opens none of the 1 key slots"), "{refused}");
        assert!(
            refused.contains("key slot 1 cannot be used: ") && refused.contains(why),
            "{refused}"
        );
    }
    // Even so, writes to the disk would destroy the area of that slot.
    for (kind, far) in [("luks2", "1"), ("reencrypt", "1"), ("of others", "1"), ("luks2", "0")] {
        let start = header(|metadata| {
            let mut slot = metadata["keyslots"]["0"].clone();
            metadata["keyslots"]["1"] = slot.clone();
            slot["type"] = json!(kind);
            slot["kdf"] = json!({ "type": "scrypt" });
            slot["area"]["offset"] = json!((DATA_OFFSET - 512).to_string());
            metadata["keyslots"][far] = slot;
        });
        check_refused(&start, "its data begins at byte 65536, and its header ends only at 69120");
    }
}

/// A header that wastes time with each slot is as bad as one that does with a single slot.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn work_is_bounded_for_all_slots_together() {
    let argon2 =
        json!({ "type": "argon2id", "time": 2, "memory": 8, "cpus": 1, "salt": "AAAAAAAAAAAA" });
    let pbkdf2 =
        json!({ "type": "pbkdf2", "hash": "sha256", "iterations": 40, "salt": "AAAAAAAAAAAA" });
    // Three slots with a wrong key demand the work that there is. Then comes the right slot, which
    // needs two rounds for its key and, like each slot, one for the check.
    for (kdf, pbkdf2_rounds, argon2_passes_kib) in [(argon2, 6, 48), (pbkdf2, 3 * 81 + 3, 0)] {
        let start = header(|metadata| {
            let right = metadata["keyslots"]["0"].clone();
            for slot in ["0", "1", "2"] {
                metadata["keyslots"][slot] = right.clone();
                metadata["keyslots"][slot]["kdf"] = kdf.clone();
            }
            metadata["keyslots"]["3"] = right;
            metadata["digests"]["0"]["keyslots"] = json!(["0", "1", "2", "3"]);
        });
        let file = image(&start, MIB);
        let open = |pbkdf2_rounds, argon2_passes_kib| {
            let most_work = KdfLimits { pbkdf2_rounds, argon2_kib: 8, argon2_passes_kib };
            let options = LuksOptions { most_work, ..options(false) };
            crate::luks::open(below(&file), &options).map_err(|error| error.to_string())
        };
        open(pbkdf2_rounds, argon2_passes_kib).unwrap();
        let error = open(pbkdf2_rounds - 1, argon2_passes_kib).unwrap_err();
        assert!(error.contains("key slot 3 asks for 1 rounds of PBKDF2"), "{error}");
        if argon2_passes_kib > 0 {
            // A slot that is left out takes no work from later slots.
            let error = open(5, argon2_passes_kib - 1).unwrap_err();
            assert!(error.contains("key slot 2 asks for 8 KiB of memory"), "{error}");
        }
    }
    let with_slots = |slots: u32| {
        header(|metadata| {
            for slot in 1..slots {
                let right = metadata["keyslots"]["0"].clone();
                metadata["keyslots"][slot.to_string()] = right;
            }
        })
    };
    open(&with_slots(32)).unwrap();
    check_refused(&with_slots(33), "it has 33 key slots, and at most 32 are allowed");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_newest_intact_header_counts() {
    let whole = header(|_| ());
    let remark = |start: &[u8]| open(start).unwrap().remark().unwrap_or_default();
    assert_eq!(remark(&whole), "");
    let damaged = |places: &[usize]| {
        let mut start = whole.clone();
        places.iter().for_each(|&place| start[place] ^= 1);
        start
    };
    // The magic, the version, a size, the JSON and the checksum of the first header.
    for place in [0, 7, 10, 5000, 450] {
        assert!(
            remark(&damaged(&[place])).contains("its header is damaged, and its copy"),
            "{place}"
        );
    }
    for place in [0, 10, 5000, 450] {
        let copy = remark(&damaged(&[HEADER_BYTES + place]));
        assert!(copy.contains("the copy of its header is damaged: "), "{place}: {copy}");
        check_refused(&damaged(&[5000, HEADER_BYTES + place]), "the checksum of the header at");
    }
    // Each header states its place. A header at a different place was only copied there.
    let mut moved = whole.clone();
    moved.copy_within(HEADER_BYTES..2 * HEADER_BYTES, 32_768);
    moved[..AREA_OFFSET].fill(0);
    check_refused(&moved, "there is no LUKS header at byte 0");
    for sequence in [2, 9] {
        let mut newer = whole.clone();
        let second = &mut newer[HEADER_BYTES..2 * HEADER_BYTES];
        second[23] = sequence;
        seal(second);
        assert!(remark(&newer).contains("the copy of its header is newer"), "{sequence}");
    }
    let mut other_version = damaged(&[HEADER_BYTES]);
    other_version[7] = 3;
    check_refused(&other_version, "the LUKS version 3");
    check_refused(&whole[..1000], "the checksum of the header at byte 0 is wrong");
    check_refused(&[], "there is no LUKS header at byte 0");
    let tiny = image(&whole[..4096], 4096);
    assert!(crate::luks::open(below(&tiny), &options(false)).is_err());
}

/// Formatting the disk would destroy its keys.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn no_error_advises_to_format_a_disk_with_a_damaged_header() {
    let whole = header(|_| ());
    let damaged = |place: usize| {
        let mut start = whole.clone();
        [place, HEADER_BYTES + place].iter().for_each(|&place| start[place] ^= 1);
        start
    };
    for start in [vec![], damaged(0), damaged(7), damaged(10), damaged(5000), damaged(450)] {
        let error = open(&start).unwrap_err();
        let advice = ["is the right disk", "`header=`", "`cryptsetup luksHeaderRestore`"];
        assert!(advice.iter().all(|part| error.contains(part)), "{error}");
        assert!(!error.contains("luksFormat"), "{error}");
    }
    let mut reencrypted = whole;
    reencrypted[..8].copy_from_slice(b"LUKS\xde\xad\0\x01");
    check_refused(&reencrypted, "complete it with `cryptsetup reencrypt --resume-only`");
}

#[test]
fn headers_of_version_1_are_checked() {
    let mut good = [0; version1::HEADER_BYTES];
    good[8..11].copy_from_slice(b"aes");
    good[40..51].copy_from_slice(b"xts-plain64");
    good[72..78].copy_from_slice(b"sha256");
    let mut put = |at: usize, value: u32| good[at..at + 4].copy_from_slice(&value.to_be_bytes());
    put(104, 4096);
    put(108, 64);
    put(164, 1000);
    for slot in 0..8 {
        let at = 208 + 48 * slot;
        put(at, if slot == 3 { 0x00ac_71f3 } else { 0x0000_dead });
        put(at + 40, 8);
        put(at + 44, 4000);
    }
    let parsed = version1::parse(&good, false).unwrap();
    assert_eq!(parsed.slots.iter().map(|slot| slot.number).collect::<Vec<_>>(), [3]);
    assert_eq!((parsed.payload.offset_bytes, parsed.payload.size_bytes), (2 << 20, None));
    for (at, value, expected) in [
        (8, u32::from_be_bytes(*b"twof"), "\"twof-xts-plain64\" is not supported"),
        (40, u32::from_be_bytes(*b"cbc\0"), "\"aes-cbc\" is not supported"),
        (72, u32::from_be_bytes(*b"md5\0"), "its hash \"md5\""),
        (72, u32::MAX, "text that is not UTF-8"),
        (104, 3, "its data begins at byte 1536"),
        // In the middle of the area of the key slot.
        (104, 100, "its data begins at byte 51200, and its header ends only at 260096"),
        (108, 48, "its keys have 48 bytes"),
        (208, 1, "its key slot 0 has an invalid state"),
        (208 + 48 * 3 + 40, u32::MAX, "its header ends only at"),
        (208 + 48 * 3 + 44, 0, "has 0 stripes"),
        (208 + 48 * 3 + 44, u32::MAX, "stripes instead of 4000"),
    ] {
        let mut bad = good;
        bad[at..at + 4].copy_from_slice(&value.to_be_bytes());
        let error = version1::parse(&bad, false).unwrap_err();
        assert!(error.contains(expected), "no {expected:?} in: {error}");
    }
    good[104..108].fill(0);
    assert_eq!(version1::parse(&good, true).unwrap().payload.offset_bytes, 0);
}

/// Key slots with a higher priority come first. Tokens do not matter.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn key_slots_are_tried_by_their_priority_and_tokens_ignored() {
    let slots = |priorities: [u32; 3]| {
        let start = header(|metadata| {
            for (slot, priority) in priorities.iter().enumerate() {
                let mut own = metadata["keyslots"]["0"].clone();
                own["priority"] = json!(priority);
                metadata["keyslots"][slot.to_string()] = own;
            }
            metadata["digests"]["0"]["keyslots"] = json!(["0", "1", "2"]);
            metadata["tokens"] = json!({ "0": { "type": "systemd-tpm2", "keyslots": ["1"] } });
        });
        let file = image(&start, MIB);
        let reader = Reader::new(&below(&file)).unwrap();
        let header = read_header(&|offset, bytes| reader.read(offset, bytes), false).unwrap();
        open(&start).unwrap();
        header.slots.iter().map(|slot| slot.number).collect::<Vec<_>>()
    };
    assert_eq!(slots([1, 1, 2]), [2, 0, 1]);
    assert_eq!(slots([1, 2, 0]), [1, 0]);
    assert_eq!(slots([2, 1, 2]), [0, 2, 1]);
}

/// The UUID is text of the header, which may come from anyone.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_uuid_of_a_disk_is_shown_without_control_characters() {
    let mut start = header(|_| ());
    for place in [0, HEADER_BYTES] {
        let binary = &mut start[place..place + HEADER_BYTES];
        binary[168..176].copy_from_slice(b"\x1b[2J\nid\0");
        seal(binary);
    }
    let chain = open(&start).unwrap().chain();
    let text = chain[0].to_string();
    assert!(text.ends_with("\\u{1b}[2J\\nid") && !text.contains(char::is_control), "{text:?}");
}
