//! The text that names a disk: its parts, and what messages repeat of one that names none. It may
//! have secrets in it, wherever somebody thought that they belong.

/// The key of the disk below.
pub(super) const OVER: &str = "over";

/// What stands in place of all that could be a secret.
const COVER: &str = "***";

/// The parts of a list; two commas stand for one in a part.
pub(crate) fn split_at_commas(text: &str) -> Vec<String> {
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

/// The names of kinds and keys, and the paths of files. All of what may stand before a disk, as in
/// `--export`, is left as it is.
pub(crate) fn outline(text: &str) -> String {
    let (before, disk) = match text.split_once("disk=") {
        Some((before, disk)) if before.is_empty() || before.ends_with(',') => {
            (format!("{before}disk="), disk)
        }
        _ => (String::new(), text),
    };
    before + &outline_of(&split_at_commas(disk))
}

/// The same of a disk, of a text that was taken apart at its commas.
pub(super) fn outline_of(parts: &[String]) -> String {
    let of_part = |(index, part): (usize, &String)| match part.split_once('=') {
        Some((OVER, disk)) => format!("{OVER}={}", of_first(disk)),
        Some((key, _)) if is_word(key) => format!("{key}={COVER}"),
        _ if index == 0 => of_first(part),
        _ => COVER.to_owned(),
    };
    parts.iter().enumerate().map(of_part).collect::<Vec<_>>().join(",")
}

/// The kind of a disk, or its short form.
fn of_first(text: &str) -> String {
    let is_path = ["/", "./", "../"].iter().any(|start| text.starts_with(start));
    match text.split_once(':') {
        _ if is_path || is_word(text) => text.to_owned(),
        Some((kind, _)) if is_word(kind) => format!("{kind}:{COVER}"),
        _ => COVER.to_owned(),
    }
}

/// Whether it could be the name of something.
fn is_word(text: &str) -> bool {
    let is_of_word = |at: char| at.is_ascii_alphanumeric() || ['.', '-', '_', '+'].contains(&at);
    text.chars().all(is_of_word)
}

/// An error of a parser of tables without the texts that it did not expect.
pub(super) fn without_texts(error: &str) -> String {
    const START: &str = "string \"";
    let (mut done, mut rest) = (String::new(), error);
    while let Some((before, after)) = rest.split_once(START) {
        done = done + before + START + COVER;
        let mut escaped = false;
        let end = after.find(|at| {
            let is_end = at == '"' && !escaped;
            escaped = at == '\\' && !escaped;
            is_end
        });
        rest = &after[end.unwrap_or(after.len())..];
    }
    done + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_and_paths_are_repeated() {
        for (text, repeated) in [
            ("disk.img", "disk.img"),
            ("/srv/disk.img,x", "/srv/disk.img,***"),
            ("nbd,host=user:hidden@h,pwd=hid,den", "nbd,host=***,pwd=***,***"),
            ("nbd:user:hidden@host", "nbd:***"),
            ("user:hidden@host", "user:***"),
            ("nbds://user%3Ahidden%40host/x?pass=hidden", "nbds:***"),
            ("luks,key=hid den,over=nbd://u:hidden@h", "luks,key=***,over=nbd:***"),
            ("luks,key=a,,b,over=luks,key='hidden'", "luks,key=***,over=luks,key=***"),
            ("socket-path=/a,disk=nbd:hidden,x=y", "socket-path=/a,disk=nbd:***,x=***"),
            ("", ""),
        ] {
            assert_eq!(outline(text), repeated);
        }
        let error = r#"invalid type: string "a \"hidden\\", expected x, string "hidden"#;
        let covered = r#"invalid type: string "***", expected x, string "***"#;
        assert_eq!(without_texts(error), covered);
    }
}
