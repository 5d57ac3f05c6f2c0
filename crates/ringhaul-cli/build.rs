//! Pages of the manual from documents: Markdown becomes roff, which `ringhaul manual` writes.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use pulldown_cmark::{Event, HeadingLevel, Options, Parser, Tag, TagEnd};

/// A page of the manual.
struct Page {
    name: &'static str,
    section: &'static str,
    about: &'static str,
    /// Files in the folder `docs`, which become the sections of the page.
    sources: &'static [&'static str],
}

const PAGES: [Page; 3] = [
    Page {
        name: "ringhaul-disks",
        section: "7",
        about: "names, properties and formats of disks",
        sources: &[
            "guide/disks.md",
            "guide/disks-images.md",
            "guide/disks-network.md",
            "guide/disks-encrypted.md",
        ],
    },
    Page {
        name: "ringhaul-control",
        section: "7",
        about: "the control socket of a daemon",
        sources: &["reference/control.md"],
    },
    Page {
        name: "ringhaul.toml",
        section: "5",
        about: "the configuration file of ringhaul serve",
        sources: &["reference/configuration.md"],
    },
];

fn main() -> io::Result<()> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let out = env::var_os("OUT_DIR").map(PathBuf::from).ok_or_else(|| {
        io::Error::other("OUT_DIR is not set; cargo sets it when it runs this program")
    })?;
    println!("cargo::rerun-if-changed=build.rs");
    for page in &PAGES {
        let mut text = head(page);
        for source in page.sources {
            let path = docs.join(source);
            println!("cargo::rerun-if-changed={}", path.display());
            let markdown = fs::read_to_string(&path).map_err(|error| {
                io::Error::other(format!("reading {}: {error}", path.display()))
            })?;
            text += &Converter::new(page).convert(&markdown);
        }
        text += &see_also(page);
        fs::write(out.join(format!("{}.{}", page.name, page.section)), text)?;
    }
    Ok(())
}

fn head(page: &Page) -> String {
    let Page { name, section, about, .. } = page;
    let (title, version) = (name.to_uppercase(), env!("CARGO_PKG_VERSION"));
    format!(
        ".TH {title} {section} \"\" \"ringhaul {version}\" \"Ringhaul\"\n.SH NAME\n{} \\- {}\n",
        escape(name),
        escape(about),
    )
}

fn see_also(page: &Page) -> String {
    let others = PAGES.iter().filter(|other| other.name != page.name);
    let others = others.map(|other| format!(", {}", reference(other)));
    format!(".SH SEE ALSO\n\\fBringhaul\\fR(1){}\n", others.collect::<String>())
}

fn reference(page: &Page) -> String {
    format!("\\fB{}\\fR({})", escape(page.name), page.section)
}

/// Text without any meaning to roff inside of a line.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        match letter {
            '\\' => escaped.push_str("\\e"),
            '-' => escaped.push_str("\\-"),
            '\'' => escaped.push_str("\\(aq"),
            '`' => escaped.push_str("\\(ga"),
            '^' => escaped.push_str("\\(ha"),
            '~' => escaped.push_str("\\(ti"),
            letter => escaped.push(letter),
        }
    }
    escaped
}

/// The place of a cell in its table.
#[derive(Default)]
struct Table {
    titles: Vec<String>,
    column: usize,
    is_head: bool,
}

/// The state of a conversion.
struct Converter<'a> {
    page: &'a Page,
    out: String,
    /// The text of the present paragraph, heading or cell.
    line: String,
    /// The macro that opens the next paragraph of a list.
    item: Option<String>,
    /// The number of the next item of each open list; none for bullets.
    lists: Vec<Option<u64>>,
    table: Table,
    is_code: bool,
    link: Option<String>,
}

impl<'a> Converter<'a> {
    fn new(page: &'a Page) -> Self {
        Self {
            page,
            out: String::new(),
            line: String::new(),
            item: None,
            lists: Vec::new(),
            table: Table::default(),
            is_code: false,
            link: None,
        }
    }

    fn convert(mut self, markdown: &str) -> String {
        for event in Parser::new_ext(markdown, Options::ENABLE_TABLES) {
            match event {
                Event::Start(tag) => self.start(tag),
                Event::End(tag) => self.end(tag),
                Event::Text(text) if self.is_code => self.line += &text,
                Event::Text(text) => self.line += &escape(&text),
                Event::Code(code) => self.line += &format!("\\fB{}\\fR", escape(&code)),
                Event::SoftBreak | Event::HardBreak => self.line.push(' '),
                // Comments, rules and footnotes have no place in a manual.
                _ => {}
            }
        }
        self.out
    }

    fn start(&mut self, tag: Tag) {
        match tag {
            Tag::Emphasis => self.line += "\\fI",
            Tag::Strong => self.line += "\\fB",
            Tag::CodeBlock(_) => {
                self.finish_paragraph();
                self.is_code = true;
            }
            Tag::Link { dest_url, .. } => self.link = Some(dest_url.into_string()),
            Tag::List(first) => {
                // An item may go on with a list.
                self.finish_paragraph();
                if !self.lists.is_empty() {
                    self.command(".RS 2");
                }
                self.lists.push(first);
            }
            Tag::Item => self.start_item(),
            Tag::Table(_) => self.table = Table::default(),
            Tag::TableHead => self.table.is_head = true,
            Tag::TableRow => self.table.column = 0,
            _ => {}
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Emphasis | TagEnd::Strong => self.line += "\\fR",
            TagEnd::Paragraph | TagEnd::Item => self.finish_paragraph(),
            TagEnd::Heading(level) => self.finish_heading(level),
            TagEnd::CodeBlock => self.finish_code(),
            TagEnd::Link => self.finish_link(),
            TagEnd::List(_) => {
                self.lists.pop();
                if !self.lists.is_empty() {
                    self.command(".RE");
                }
            }
            TagEnd::TableHead => self.table.is_head = false,
            TagEnd::TableCell => self.finish_cell(),
            _ => {}
        }
    }

    /// Writes a line, unless it is empty.
    fn command(&mut self, words: &str) {
        if words.is_empty() {
            return;
        }
        self.out += words;
        self.out.push('\n');
    }

    /// Writes a line of text, which is no command even if it begins like one.
    fn text(&mut self, line: &str) {
        if line.starts_with('.') {
            self.out += "\\&";
        }
        self.command(line);
    }

    fn finish_paragraph(&mut self) {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            return;
        }
        let opening = self.item.take();
        self.command(&opening.unwrap_or_else(|| self.continuation().to_owned()));
        self.text(&line);
    }

    /// The macro of a paragraph that begins no item. A heading needs none after it.
    fn continuation(&self) -> &'static str {
        let last = self.out.lines().next_back().unwrap_or_default();
        match self.lists.is_empty() {
            false => ".IP",
            true if last.starts_with(".S") => "",
            true => ".PP",
        }
    }

    fn start_item(&mut self) {
        self.item = Some(match self.lists.last_mut() {
            Some(Some(number)) => {
                *number += 1;
                format!(".IP {}. 3", *number - 1)
            }
            _ => ".IP \\(bu 2".to_owned(),
        });
    }

    /// The heading of a document is a section of a page with several ones.
    fn finish_heading(&mut self, level: HeadingLevel) {
        let title = std::mem::take(&mut self.line);
        let is_alone = self.page.sources.len() == 1;
        match level {
            HeadingLevel::H1 if is_alone => self.command(".SH DESCRIPTION"),
            HeadingLevel::H1 => self.command(&format!(".SH {}", upper_case(&title))),
            HeadingLevel::H2 if is_alone => self.command(&format!(".SH {}", upper_case(&title))),
            HeadingLevel::H2 => self.command(&format!(".SS {title}")),
            _ if is_alone => self.command(&format!(".SS {title}")),
            _ => self.command(&format!(".PP\n\\fB{title}\\fR")),
        }
    }

    fn finish_code(&mut self) {
        let code = std::mem::take(&mut self.line);
        self.is_code = false;
        self.command(self.continuation());
        self.command(".nf");
        // An indentation that text of a list has too.
        for line in code.trim_end().lines() {
            self.out += format!("    {}", escape(line)).trim_end();
            self.out.push('\n');
        }
        self.command(".fi");
    }

    /// A page of the manual is named; other documents are not installed as pages.
    fn finish_link(&mut self) {
        let Some(target) = self.link.take() else { return };
        if target.contains("://") {
            self.line += &format!(" <{}>", escape(&target));
            return;
        }
        let file = target.split('#').next().unwrap_or_default();
        let file = file.rsplit('/').next().unwrap_or_default();
        let has = |page: &&Page| page.sources.iter().any(|source| source.ends_with(file));
        let page = PAGES.iter().find(has).filter(|_| !file.is_empty());
        if let Some(page) = page.filter(|page| page.name != self.page.name) {
            self.line += &format!(" ({})", reference(page));
        }
    }

    /// A row becomes an entry: the first cell is its title, and the others follow, with the titles
    /// of their columns if there are several.
    fn finish_cell(&mut self) {
        let cell = std::mem::take(&mut self.line);
        let column = self.table.column;
        self.table.column += 1;
        if self.table.is_head {
            self.table.titles.push(cell);
        } else if column == 0 && !cell.is_empty() {
            self.command(".TP");
            self.text(&cell);
            self.item = Some(String::new());
        } else if column > 0 && !cell.is_empty() {
            // The first line of the body follows the title at once.
            if self.item.take().is_none() {
                self.command(".br");
            }
            let title = match self.table.titles.get(column) {
                Some(title) if self.table.titles.len() > 2 && !title.is_empty() => {
                    format!("{title}: ")
                }
                _ => String::new(),
            };
            self.text(&format!("{title}{cell}"));
        }
    }
}

/// Upper case, except for the names of characters and fonts.
fn upper_case(title: &str) -> String {
    let mut upper = String::new();
    let mut letters = title.chars();
    while let Some(letter) = letters.next() {
        upper.extend(letter.to_uppercase());
        if letter == '\\' {
            let name = letters.next().unwrap_or('\\');
            upper.push(name);
            let more = match name {
                '(' => 2,
                'f' => 1,
                _ => 0,
            };
            upper.extend(letters.by_ref().take(more));
        }
    }
    upper
}
