//! A document that can be written as HTML and as Markdown.

use std::fmt::Write as _;

/// A piece of a document. Texts are plain: writers escape markup.
pub(super) enum Block {
    /// Level 2 or 3.
    Heading(u8, String),
    Paragraph(String),
    List(Vec<String>),
    /// Named lists.
    Groups(Vec<(String, Vec<String>)>),
    /// A table. The first `words` columns are words, the rest are figures.
    Table {
        caption: String,
        head: Vec<String>,
        rows: Vec<Vec<String>>,
        words: usize,
    },
    /// Pictures side by side, as SVG. Only in HTML.
    Plots(Vec<Plot>),
    /// Lines to type, folded in HTML.
    Commands {
        title: String,
        lines: Vec<String>,
    },
}

pub(super) struct Plot {
    pub(super) svg: String,
    pub(super) caption: String,
}

/// Writes the blocks as HTML.
pub(super) fn html(blocks: &[Block]) -> String {
    let mut out = String::new();
    for block in blocks {
        // Writing to a String cannot fail.
        let _ = html_block(&mut out, block);
    }
    out
}

fn html_block(out: &mut String, block: &Block) -> std::fmt::Result {
    match block {
        Block::Heading(level, text) => {
            let id = anchor(text);
            writeln!(out, "<h{level} id=\"{id}\">{}</h{level}>", escape(text))
        }
        Block::Paragraph(text) => writeln!(out, "<p>{}</p>", escape(text)),
        Block::List(items) => {
            writeln!(out, "<ul>")?;
            for item in items {
                writeln!(out, "<li>{}</li>", escape(item))?;
            }
            writeln!(out, "</ul>")
        }
        Block::Groups(groups) => {
            writeln!(out, "<ul class=\"groups\">")?;
            for (name, items) in groups {
                writeln!(out, "<li><strong>{}</strong>:<ul>", escape(name))?;
                for item in items {
                    writeln!(out, "<li>{}</li>", escape(item))?;
                }
                writeln!(out, "</ul></li>")?;
            }
            writeln!(out, "</ul>")
        }
        Block::Table { caption, head, rows, words } => html_table(out, caption, head, rows, *words),
        Block::Plots(plots) if plots.is_empty() => Ok(()),
        Block::Plots(plots) => {
            writeln!(out, "<div class=\"plots\">")?;
            for Plot { svg, caption } in plots {
                let caption = escape(caption);
                writeln!(out, "<figure>{svg}<figcaption>{caption}</figcaption></figure>")?;
            }
            writeln!(out, "</div>")
        }
        Block::Commands { title, lines } => {
            let (title, lines) = (escape(title), escape(&lines.join("\n")));
            writeln!(out, "<details><summary>{title}</summary><pre>{lines}</pre></details>")
        }
    }
}

fn html_table(
    out: &mut String,
    caption: &str,
    head: &[String],
    rows: &[Vec<String>],
    words: usize,
) -> std::fmt::Result {
    writeln!(out, "<div class=\"table\"><table><caption>{}</caption><thead><tr>", escape(caption))?;
    let class = |column: usize| if column < words { "" } else { " class=\"n\"" };
    for (column, text) in head.iter().enumerate() {
        write!(out, "<th{}>{}</th>", class(column), escape(text))?;
    }
    writeln!(out, "</tr></thead><tbody>")?;
    for row in rows {
        write!(out, "<tr>")?;
        for (column, text) in row.iter().enumerate() {
            write!(out, "<td{}>{}</td>", class(column), escape(text))?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</tbody></table></div>")
}

/// Writes the blocks as Markdown, without pictures.
pub(super) fn markdown(blocks: &[Block]) -> String {
    let mut out = String::new();
    for block in blocks {
        let _ = markdown_block(&mut out, block);
    }
    out
}

fn markdown_block(out: &mut String, block: &Block) -> std::fmt::Result {
    match block {
        Block::Heading(level, text) => {
            writeln!(out, "\n{} {text}", "#".repeat(usize::from(*level)))
        }
        Block::Paragraph(text) => writeln!(out, "\n{}", plain(text)),
        Block::List(items) => {
            writeln!(out)?;
            items.iter().try_for_each(|item| writeln!(out, "- {}", plain(item)))
        }
        Block::Groups(groups) => {
            writeln!(out)?;
            groups.iter().try_for_each(|(name, items)| {
                writeln!(out, "- {}:", plain(name))?;
                items.iter().try_for_each(|item| writeln!(out, "  - {}", plain(item)))
            })
        }
        Block::Table { caption, head, rows, words } => {
            writeln!(out, "\n{}:\n\n| {} |", plain(caption), head.join(" | "))?;
            let lines = (0..head.len()).map(|column| if column < *words { "---" } else { "--:" });
            writeln!(out, "|{}|", lines.collect::<Vec<_>>().join("|"))?;
            rows.iter().try_for_each(|row| writeln!(out, "| {} |", row.join(" | ")))
        }
        Block::Plots(_) => Ok(()),
        Block::Commands { title, lines } => {
            writeln!(out, "\n{}:\n\n```\n{}\n```", plain(title), lines.join("\n"))
        }
    }
}

/// Escapes Markdown's marks of emphasis.
fn plain(text: &str) -> String {
    text.replace('_', "\\_").replace('*', "\\*").replace('<', "\\<")
}

/// Escapes HTML's markup.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Makes an id from a heading.
pub(super) fn anchor(text: &str) -> String {
    let letters = text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' });
    letters.collect::<String>().to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks() -> Vec<Block> {
        vec![
            Block::Heading(2, "1. Rings & calls".to_owned()),
            Block::Paragraph("io_submit <once>".to_owned()),
            Block::Table {
                caption: "figures".to_owned(),
                head: vec!["disk".to_owned(), "IOPS".to_owned()],
                rows: vec![vec!["zram".to_owned(), "1k".to_owned()]],
                words: 1,
            },
            Block::Plots(vec![Plot { svg: "<svg/>".to_owned(), caption: "a < b".to_owned() }]),
            Block::Commands { title: "type".to_owned(), lines: vec!["a --b".to_owned()] },
        ]
    }

    #[test]
    fn html_escapes_texts_and_keeps_pictures() {
        let text = html(&blocks());
        assert!(text.contains("<h2 id=\"1--rings---calls\">1. Rings &amp; calls</h2>"), "{text}");
        assert!(text.contains("io_submit &lt;once&gt;"), "{text}");
        assert!(text.contains("<td>zram</td><td class=\"n\">1k</td>"), "{text}");
        assert!(text.contains("<svg/><figcaption>a &lt; b"), "{text}");
    }

    #[test]
    fn markdown_has_tables_and_no_pictures() {
        let text = markdown(&blocks());
        assert!(text.contains("\n## 1. Rings & calls\n"), "{text}");
        assert!(text.contains("io\\_submit \\<once>"), "{text}");
        assert!(text.contains("| disk | IOPS |\n|---|--:|\n| zram | 1k |\n"), "{text}");
        assert!(!text.contains("svg"), "{text}");
    }
}
