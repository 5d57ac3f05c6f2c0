//! Removes secrets that users wrote in the wrong place, such as into a URI, from messages.
//!
//! A disk name that was parsed contains no secret. A name that was not parsed is repeated in
//! errors, and so are messages of other libraries about it. All text that leaves the process passes
//! through here.

use std::borrow::Cow;

/// The replacement of a secret.
pub const REDACTED: &str = "***";

/// Keys with secret values, in any program.
const KEYS: &[&str] = &[
    "key",
    "pass",
    "passphrase",
    "passwd",
    "password",
    "psk",
    "pwd",
    "secret",
    "secret-key",
    "tls-psk",
    "token",
];

/// Returns true if the value of this key is a secret.
pub fn is_secret_key(key: &str) -> bool {
    KEYS.iter().any(|known| known.eq_ignore_ascii_case(key))
}

/// Returns the text without users and passwords of URIs, and without values of keys such as `key=`.
pub fn redact(text: &str) -> Cow<'_, str> {
    if !text.contains("://") && !text.contains('=') {
        return Cow::Borrowed(text);
    }
    let covered = without_users(text);
    Cow::Owned(without_values(&covered))
}

/// Makes a text safe for a terminal: without secrets, and with control characters, for example in
/// names, escaped.
pub fn printable(text: &str) -> String {
    escape_controls(&redact(text))
}

/// Escapes the control characters of a text that has no secret, such as the name of a file.
#[must_use]
pub fn escape_controls(text: &str) -> String {
    let escape = |character: char| match character.is_control() {
        true => character.escape_default().to_string(),
        false => character.to_string(),
    };
    text.chars().map(escape).collect()
}

/// Escapes the control characters that JSON permits in its strings, U+007F to U+009F. The text is
/// JSON, and means the same afterwards.
#[must_use]
pub fn escape_json(json: String) -> String {
    let is_raw = |character| ('\u{7f}'..='\u{9f}').contains(&character);
    if !json.contains(is_raw) {
        return json;
    }
    let escape = |character| match is_raw(character) {
        true => format!("\\u{:04x}", u32::from(character)),
        false => character.to_string(),
    };
    json.chars().map(escape).collect()
}

/// A part of a text without a user and a password, which end with an `@`. In the name of an image
/// in a Ceph cluster an `@` precedes a snapshot, and in a path it is an ordinary character.
pub fn redact_part(text: &str) -> String {
    let is_path = ["/", "./", "../"].iter().any(|start| text.starts_with(start));
    if is_path || text.starts_with("rbd:") {
        return redact(text).into_owned();
    }
    // A URI may encode the `@`.
    let end = text.rfind('@').max(text.rfind("%40"));
    let Some(end) = end else { return redact(text).into_owned() };
    let scheme = match text.split_once(':') {
        Some((scheme, rest)) if is_word(scheme) && rest.starts_with("//") => scheme.len() + 3,
        Some((scheme, _)) if is_word(scheme) => scheme.len() + 1,
        _ => 0,
    };
    let scheme = scheme.min(end);
    format!("{}{REDACTED}{}", &text[..scheme], redact(&text[end..]))
}

/// Returns true if the text could be a name.
pub fn is_word(text: &str) -> bool {
    let is_of_word = |at: char| at.is_ascii_alphanumeric() || ['.', '-', '_', '+'].contains(&at);
    text.chars().all(is_of_word)
}

/// Returns true if a character ends a word in a sentence.
fn ends_word(character: char) -> bool {
    character.is_whitespace() || ['"', '\'', '`'].contains(&character)
}

fn without_users(text: &str) -> String {
    let mut done = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        done.push_str(before);
        done.push_str("://");
        rest = match user_bytes(after) {
            Some(bytes) => {
                done.push_str(REDACTED);
                &after[bytes..]
            }
            None => after,
        };
    }
    done + rest
}

/// Returns the length in bytes of the user and password after `://`: all text up to the last `@` of
/// the word. A password may contain characters that no URI allows, so an apparent port may be its
/// start. An `@` in the name of an export does not count.
fn user_bytes(text: &str) -> Option<usize> {
    let word = &text[..text.find(ends_word).unwrap_or(text.len())];
    let authority = &word[..word.find(['/', '?', '#']).unwrap_or(word.len())];
    if authority.contains('@') {
        return word.rfind('@');
    }
    let (_, port) = authority[authority.rfind(']').unwrap_or(0)..].split_once(':')?;
    // In a sentence a colon may follow a name, and a comma the disk.
    let port = port.split(',').next()?.trim_end_matches(':');
    if port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    word.rfind('@').or_else(|| text.find('@'))
}

fn without_values(text: &str) -> String {
    let mut done = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('=') {
        let is_of_word = |at: char| at.is_ascii_alphanumeric() || at == '-' || at == '_';
        let key = &before[before.trim_end_matches(is_of_word).len()..];
        done.push_str(before);
        done.push('=');
        rest = after;
        if is_secret_key(key) {
            let value = value_of(after);
            // The daemon's own errors contain `KEY=VALUE`.
            if !value.is_empty() && value != "VALUE" {
                done.push_str(REDACTED);
                rest = &after[value.len()..];
            }
        }
    }
    done + rest
}

/// Returns the value at the start of a text. Two commas within it stand for one.
fn value_of(text: &str) -> &str {
    let mut end = 0;
    while let Some(found) = text[end..].find(|at: char| ends_word(at) || at == ',' || at == '&') {
        end += found;
        if !text[end..].starts_with(",,") {
            return text[..end].trim_end_matches([':', ';']);
        }
        end += ",,".len();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_passwords_are_covered() {
        for (text, covered) in [
            ("nbd://user:secret@host/x", "nbd://***@host/x"),
            ("nbds://secret@host", "nbds://***@host"),
            ("nbd+unix://u:secret@/x?socket=/a", "nbd+unix://***@/x?socket=/a"),
            ("--disk raw,over=nbd://u:se,cret@host/x: no", "--disk raw,over=nbd://***@host/x: no"),
            ("nbd://u:se/cret@host/x", "nbd://***@host/x"),
            ("nbd://u:se?cr@et@host/x", "nbd://***@host/x"),
            ("nbd://u:se cret@host/x", "nbd://***@host/x"),
            (
                "'nbd://u:secret@[::1]:99/x' and http://a@b",
                "'nbd://***@[::1]:99/x' and http://***@b",
            ),
            ("string \"nbd://u:secret@host/x\", expected", "string \"nbd://***@host/x\", expected"),
        ] {
            assert_eq!(redact(text), covered);
        }
    }

    #[test]
    fn values_of_secrets_are_covered() {
        for (text, covered) in [
            ("rbd:p/i,key=secret", "rbd:p/i,key=***"),
            ("rbd:p/i:id=a:key=secret:conf=/c: no", "rbd:p/i:id=a:key=***: no"),
            ("nbd://h/x?password=secret&socket=/a", "nbd://h/x?password=***&socket=/a"),
            ("luks,key=se,,cret,over=/a: no", "luks,key=***,over=/a: no"),
            ("'KEY=secret' is", "'KEY=***' is"),
        ] {
            assert_eq!(redact(text), covered);
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        let text = printable("a\u{1b}[31mb\nERROR key=hidden \u{9b}c");
        assert_eq!(text, "a\\u{1b}[31mb\\nERROR key=*** \\u{9b}c");
    }

    /// The libraries escape the characters up to U+001F.
    #[test]
    fn the_control_characters_of_json_are_escaped() {
        let json = "{\n \"a\": \"~\u{7f}\u{80}\u{9b}31m\u{9f}\u{a0}\u{e9}\"\n}".to_owned();
        let escaped = "{\n \"a\": \"~\\u007f\\u0080\\u009b31m\\u009f\u{a0}\u{e9}\"\n}";
        assert_eq!(escape_json(json), escaped);
        assert_eq!(escape_json("[\"\u{e9}\"]\n".to_owned()), "[\"\u{e9}\"]\n");
    }

    #[test]
    fn texts_without_secrets_stay() {
        for text in [
            "nbd://host:10809/a@b: it is away",
            "nbd://[::1]:10809/a@b",
            "nbd+unix:///x?socket=/a@b",
            "nbd://host/x: cannot find host@example",
            "cannot use nbd://host:99: ask a@b",
            "luks,key-file=/k,key-fd=3,over=/a",
            "rbd:p/i@snapshot",
            "'key' is not of the form KEY=VALUE, key= too",
        ] {
            assert_eq!(redact(text), text);
        }
    }
}
