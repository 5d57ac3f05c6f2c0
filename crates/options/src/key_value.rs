//! Options of the form `KEY=VALUE,...`, read into serde types.
//!
//! A struct takes the parts with its fields as keys, each key once. Values are texts, whole
//! numbers, sizes ([`Size`]), `on` or `off`, and words, which are the variants of an enum. A field
//! of type `Vec<String>` takes its value and all parts behind it: they name a nested object, such
//! as the disk below a layer. A key lacks the unit at the end of its field's name: `deadline` is
//! the field `deadline_seconds`.

use std::num::{IntErrorKind, ParseIntError};
use std::str::FromStr;

use serde::de::value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{self, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};

use crate::redact::redact_part;
use crate::size::parse_size;

/// A size in bytes, with or without a suffix as in [`parse_size`]. In other formats it is a number.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Size(pub u64);

/// The reason that parts are refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A key that no field has.
    #[error("unknown key '{key}' (expected: {})", expected.join(", "))]
    UnknownKey {
        /// The key, without secrets.
        key: String,
        /// The keys, in the order of the fields.
        expected: Vec<&'static str>,
    },
    /// A name that no variant has.
    #[error("unknown word '{word}' (expected: {})", expected.join(", "))]
    UnknownWord {
        /// The name, without secrets.
        word: String,
        /// The names of all variants.
        expected: &'static [&'static str],
    },
    /// A field that has no default, and no value here.
    #[error("it lacks {0}=VALUE")]
    MissingKey(&'static str),
    /// A reason in words.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// Adds the key of the faulty value.
    fn with_key(self, key: &str) -> Self {
        Self::Other(match self {
            Self::UnknownWord { word, expected } => {
                format!("{key} is '{word}' (expected: {})", expected.join(", "))
            }
            other => format!("{key}: {other}"),
        })
    }
}

impl de::Error for Error {
    fn custom<T: std::fmt::Display>(reason: T) -> Self {
        Self::Other(reason.to_string())
    }

    fn unknown_variant(word: &str, expected: &'static [&'static str]) -> Self {
        Self::UnknownWord { word: redact_part(word), expected }
    }

    fn unknown_field(key: &str, expected: &'static [&'static str]) -> Self {
        Self::UnknownKey { key: redact_part(key), expected: expected.to_vec() }
    }

    fn missing_field(field: &'static str) -> Self {
        Self::MissingKey(key_of(field))
    }

    fn duplicate_field(field: &'static str) -> Self {
        Self::Other(format!("{} is given twice; leave one of them out", key_of(field)))
    }
}

/// The key of a field.
fn key_of(field: &'static str) -> &'static str {
    field.strip_suffix("-seconds").unwrap_or(field)
}

/// The parts of a list; two commas stand for one in a part.
pub fn split_at_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match (character, parts.last_mut()) {
            (',', _) if characters.peek() != Some(&',') => parts.push(String::new()),
            (',', Some(part)) => part.extend(characters.next()),
            (_, Some(part)) => part.push(character),
            (_, None) => {}
        }
    }
    parts
}

/// Parts of the form `KEY=VALUE` that no struct has taken yet.
pub struct Parts<'a> {
    left: Vec<&'a str>,
    /// The keys of all structs so far, for an error.
    expected: Vec<&'static str>,
    /// True for words of a command line, false for parts that were split at commas.
    are_words: bool,
}

impl<'a> Parts<'a> {
    /// Parts that were split at commas. No value may be empty.
    pub fn new(parts: &'a [String]) -> Self {
        let left = parts.iter().map(String::as_str).collect();
        Self { left, expected: Vec::new(), are_words: false }
    }

    /// Words of a command line, with values that may be empty.
    pub fn from_words(words: &'a [String]) -> Self {
        Self { are_words: true, ..Self::new(words) }
    }

    /// Takes the parts with fields of `T` as keys, except `hidden` fields. If `T` has the key of a
    /// nested object, it takes all parts behind that key.
    ///
    /// # Errors
    ///
    /// When a value is wrong, or a part has not the form `KEY=VALUE`.
    pub fn take<T: Deserialize<'a>>(&mut self, hidden: &[&str]) -> Result<T, Error> {
        T::deserialize(Fields { hidden, is_last: false, ..Fields::new(self) })
    }

    /// Reads all parts that are left.
    ///
    /// # Errors
    ///
    /// Like [`take`](Self::take), and when a key is unknown.
    pub fn finish<T: Deserialize<'a>>(mut self) -> Result<T, Error> {
        T::deserialize(Fields::new(&mut self))
    }

    /// Reads all parts that are left as the variant of `T` with the name `variant`.
    ///
    /// # Errors
    ///
    /// Like [`finish`](Self::finish), and when no variant has this name.
    pub fn finish_variant<T: Deserialize<'a>>(mut self, variant: &'a str) -> Result<T, Error> {
        let content = std::iter::once((variant, Fields::new(&mut self)));
        T::deserialize(MapAccessDeserializer::new(MapDeserializer::new(content)))
    }
}

/// The fields of one struct.
struct Fields<'p, 'de> {
    parts: &'p mut Parts<'de>,
    /// Fields without a key.
    hidden: &'p [&'p str],
    /// True if no other struct has fields for the parts that are left.
    is_last: bool,
    /// The fields with a key. `None`: the struct refuses unknown keys itself.
    names: Option<Vec<&'static str>>,
    /// The number of the part that is read.
    at: usize,
    /// The key of that part; its value is read next.
    key: &'de str,
}

impl<'p, 'de> Fields<'p, 'de> {
    fn new(parts: &'p mut Parts<'de>) -> Self {
        Self { parts, hidden: &[], is_last: true, names: None, at: 0, key: "" }
    }

    /// The field with this key. `None`: another struct may have it.
    fn find(&mut self, key: &'de str) -> Result<Option<&'de str>, Error> {
        let Some(names) = &self.names else { return Ok(Some(key)) };
        match names.iter().copied().find(|name| key_of(name) == key) {
            None if self.is_last => {
                let expected = std::mem::take(&mut self.parts.expected);
                Err(Error::UnknownKey { key: redact_part(key), expected })
            }
            found => Ok(found),
        }
    }
}

impl<'de> IntoDeserializer<'de, Error> for Fields<'_, 'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Fields<'_, 'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        mut self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let names = names.iter().copied().filter(|name| !self.hidden.contains(name));
        let names: Vec<&str> = names.collect();
        self.parts.expected.extend(names.iter().map(|name| key_of(name)));
        self.names = Some(names);
        visitor.visit_map(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de> MapAccess<'de> for Fields<'_, 'de> {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        while let Some(part) = self.parts.left.get(self.at).copied() {
            let Some((key, value)) = part.split_once('=') else {
                let advice = match self.parts.are_words {
                    true => "",
                    false => "; write a comma in a value twice",
                };
                let part = redact_part(part);
                return refuse(format!("'{part}' is not of the form KEY=VALUE{advice}"));
            };
            let Some(name) = self.find(key)? else {
                self.at += 1;
                continue;
            };
            if value.is_empty() && !self.parts.are_words {
                let form = "is not of the form KEY=VALUE";
                return refuse(format!("{key} has no value: '{part}' {form}"));
            }
            self.key = key;
            return seed.deserialize(name.into_deserializer()).map(Some);
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        let part = self.parts.left.remove(self.at);
        let text = &part[self.key.len() + "=".len()..];
        let value = Value { text, left: &mut self.parts.left, at: self.at };
        seed.deserialize(value).map_err(|error| error.with_key(self.key))
    }
}

fn refuse<T>(reason: String) -> Result<T, Error> {
    Err(Error::Other(reason))
}

/// The value of one key.
struct Value<'p, 'de> {
    text: &'de str,
    left: &'p mut Vec<&'de str>,
    /// The number of the part behind it.
    at: usize,
}

/// Parses a number.
fn number<T: FromStr<Err = ParseIntError>>(text: &str) -> Result<T, Error> {
    text.parse().map_err(|error: ParseIntError| {
        Error::Other(match error.kind() {
            IntErrorKind::PosOverflow => format!("the number {text} is too large"),
            _ => "it must be a whole number".to_owned(),
        })
    })
}

macro_rules! numbers {
    ($($name:ident $visit:ident)*) => {
        $(fn $name<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            visitor.$visit(number(self.text)?)
        })*
    };
}

impl<'de> Deserializer<'de> for Value<'_, 'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_borrowed_str(self.text)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.text {
            "on" | "1" => visitor.visit_bool(true),
            "off" | "0" => visitor.visit_bool(false),
            other => Err(de::Error::unknown_variant(other, &["on", "off"])),
        }
    }

    numbers! {
        deserialize_u16 visit_u16
        deserialize_u32 visit_u32
        deserialize_u64 visit_u64
        deserialize_i32 visit_i32
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        if name != "Size" {
            return visitor.visit_newtype_struct(self);
        }
        let bytes = parse_size(self.text).map_err(Error::Other)?;
        visitor.visit_newtype_struct(bytes.into_deserializer())
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_enum(self.text.into_deserializer())
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let nested = std::iter::once(self.text).chain(self.left.drain(self.at..));
        visitor.visit_seq(SeqDeserializer::new(nested))
    }

    forward_to_deserialize_any! {
        i8 i16 i64 i128 u8 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple
        tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Word {
        OneWord,
        Other,
    }

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(rename_all = "kebab-case", default)]
    struct Keys {
        text: Option<String>,
        number: u16,
        wait_seconds: Option<i32>,
        is_on: Option<bool>,
        word: Option<Word>,
        inside: Vec<String>,
    }

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default)]
    struct More {
        hidden: Option<u64>,
        #[serde(deserialize_with = "size")]
        size: u64,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Even {
        #[serde(deserialize_with = "even")]
        even: u64,
    }

    fn even<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let number = u64::deserialize(deserializer)?;
        let is_even = number.is_multiple_of(2);
        is_even.then_some(number).ok_or_else(|| de::Error::custom("it must be even"))
    }

    fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        Size::deserialize(deserializer).map(|size| size.0)
    }

    fn keys(text: &str) -> Result<Keys, String> {
        Parts::new(&split_at_commas(text)).finish().map_err(|error| error.to_string())
    }

    #[test]
    fn a_struct_has_the_values_of_its_keys() {
        let expected = Keys {
            text: Some("a,b=c".into()),
            number: 7,
            wait_seconds: Some(-3),
            is_on: Some(true),
            word: Some(Word::OneWord),
            inside: vec!["x".into(), "number=8".into(), "y".into()],
        };
        let text = "text=a,,b=c,number=7,wait=-3,is-on=on,word=one-word,inside=x,number=8,y";
        assert_eq!(keys(text), Ok(expected));
        for (text, is_on) in [("is-on=0", false), ("is-on=off", false), ("is-on=1", true)] {
            assert_eq!(keys(text).map(|keys| keys.is_on), Ok(Some(is_on)), "{text}");
        }
        let empty = ["text=".to_owned()];
        let empty: Keys = Parts::from_words(&empty).finish().unwrap();
        assert_eq!(empty.text.as_deref(), Some(""));
        let error = Parts::from_words(&["a,b".to_owned()]).finish::<Keys>().unwrap_err();
        assert_eq!(error.to_string(), "'a,b' is not of the form KEY=VALUE");
    }

    #[test]
    fn an_error_names_the_key_and_its_possible_values() {
        for (text, expected) in [
            ("", "'' is not of the form KEY=VALUE"),
            ("number", "'number' is not of the form KEY=VALUE; write a comma in a value twice"),
            ("user:hidden@host", "'user:***@host' is not of the form"),
            ("text=", "text has no value: 'text=' is not of the form KEY=VALUE"),
            ("text=a,text=b", "text is given twice"),
            ("wait=1,wait=2", "wait is given twice"),
            ("number=x", "number: it must be a whole number"),
            ("number=65536", "number: the number 65536 is too large"),
            ("is-on=yes", "is-on is 'yes' (expected: on, off)"),
            ("word=two", "word is 'two' (expected: one-word, other)"),
            ("word=user:hidden@host", "word is 'user:***@host'"),
            ("user:hidden@host=1", "unknown key 'user:***@host'"),
            (
                "wait-seconds=1",
                "unknown key 'wait-seconds' (expected: text, number, wait, is-on, word, inside)",
            ),
        ] {
            let error = keys(text).unwrap_err();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }

    #[test]
    fn several_structs_share_the_parts() {
        let read = |text: &str| {
            let parts = split_at_commas(text);
            let mut parts = Parts::new(&parts);
            let more: More = parts.take(&["hidden"])?;
            Ok((more.size, parts.finish::<Keys>()?.number))
        };
        let reason = |text: &str| read(text).map_err(|error: Error| error.to_string());
        assert_eq!(reason("number=1,size=1M"), Ok((1 << 20, 1)));
        for (text, expected) in [("even=2", "Ok(Even { even: 2 })"), ("even=3", "be even")] {
            let parts = [text.to_owned()];
            let read = Parts::new(&parts).finish::<Even>().map_err(|error| error.to_string());
            assert!(format!("{read:?}").contains(expected), "{read:?}");
        }
        assert_eq!(
            reason("size=1X").unwrap_err().split(" (").next(),
            Some("size: '1X' has the unknown size suffix 'X'",)
        );
        let error = reason("hidden=1").unwrap_err();
        assert!(error.contains("'hidden' (expected: size, text, number,"), "{error}");
    }
}
