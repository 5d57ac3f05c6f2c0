//! The text that names a disk: its parts, and the form in which messages repeat it. Users may put
//! secrets anywhere in it: messages cover secrets and show typing mistakes.

use ringhaul_options::key_value::split_at_commas;
use ringhaul_options::redact::{REDACTED, is_secret_key, is_word, redact_part};

/// The key of the disk below.
pub(super) const OVER: &str = "over";

/// The text without secrets. Words before the disk, as in `--export`, stay as they are.
pub fn redact_spec(text: &str) -> String {
    let (before, disk) = match text.split_once("disk=") {
        Some((before, disk)) if before.is_empty() || before.ends_with(',') => {
            (format!("{before}disk="), disk)
        }
        _ => (String::new(), text),
    };
    before + &redact_spec_parts(&split_at_commas(disk))
}

/// The text of a disk without secrets, from its parts between commas. A secret may have commas in
/// it, so everything between the key of a secret and the next layer is covered.
pub(super) fn redact_spec_parts(parts: &[String]) -> String {
    let mut is_secret = false;
    let of_part = |part: &String| match part.split_once('=') {
        Some((OVER, disk)) => {
            is_secret = false;
            format!("{OVER}={}", redact_part(disk))
        }
        Some((key, _)) if is_secret_key(key) => {
            is_secret = true;
            format!("{key}={REDACTED}")
        }
        _ if is_secret => REDACTED.to_owned(),
        Some((key, value)) if is_word(key) => format!("{key}={}", redact_part(value)),
        _ => redact_part(part),
    };
    parts.iter().map(of_part).map(|part| part.replace(',', ",,")).collect::<Vec<_>>().join(",")
}

/// An error of a parser of tables without secrets in the texts that it did not expect.
pub(super) fn redact_quoted(error: &str) -> String {
    const START: &str = "string \"";
    let (mut done, mut rest) = (String::new(), error);
    while let Some((before, after)) = rest.split_once(START) {
        done = done + before + START;
        let mut escaped = false;
        let end = after.find(|at| {
            let is_end = at == '"' && !escaped;
            escaped = at == '\\' && !escaped;
            is_end
        });
        let end = end.unwrap_or(after.len());
        done += &redact_part(&after[..end]);
        rest = &after[end..];
    }
    done + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_covered_and_mistakes_are_shown() {
        for (text, repeated) in [
            ("disk.img", "disk.img"),
            ("vms/disk.img", "vms/disk.img"),
            ("null:1X", "null:1X"),
            ("socket-path=a,blkfile=b", "socket-path=a,blkfile=b"),
            ("/srv/disk.img,x", "/srv/disk.img,x"),
            ("/srv/a,,b.img,x", "/srv/a,,b.img,x"),
            ("/srv/a@b", "/srv/a@b"),
            ("rbd:p/i@snapshot,k", "rbd:p/i@snapshot,k"),
            ("nbd,host=user:hidden@h,pwd=hid,den", "nbd,host=user:***@h,pwd=***,***"),
            ("nbd:user:hidden@host", "nbd:***@host"),
            ("user:hidden@host", "user:***@host"),
            ("nbds://user%3Ahidden%40host/x?pass=hidden", "nbds://***%40host/x?pass=***"),
            ("nbd://h/x?pass=hidden", "nbd://h/x?pass=***"),
            ("luks,key=hid den,over=nbd://u:hidden@h", "luks,key=***,over=nbd://***@h"),
            ("luks,key=a,,b,over=luks,key='hidden'", "luks,key=***,over=luks,key=***"),
            ("luks,key=hid,den=x,over=/a", "luks,key=***,***,over=/a"),
            ("socket-path=/a,disk=nbd:x:hidden@y,x=y", "socket-path=/a,disk=nbd:***@y,x=y"),
            ("", ""),
        ] {
            assert_eq!(redact_spec(text), repeated);
        }
        let error = r#"invalid type: string "u:\"hidden\\@h", expected x, string "port"#;
        let covered = r#"invalid type: string "u:***@h", expected x, string "port"#;
        assert_eq!(redact_quoted(error), covered);
    }
}
