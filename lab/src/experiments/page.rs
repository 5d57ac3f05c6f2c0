//! The HTML page around a document. The page loads nothing from outside.

use super::document::{Block, anchor, escape, html};

/// The colours, once for light and once for dark pages. The pictures use the same.
const STYLE: &str = "
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2024; --soft: #5b6470;
  --line: #d9dde2; --panel: #f5f6f8; --off: #b35900; --on: #0b62c4; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e6e8ea; --soft: #a0a8b2;
  --line: #363c43; --panel: #1d2125; --off: #ffab5c; --on: #6cb0ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.4rem; margin: 3rem 0 .5rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, ul { max-width: 48rem; }
li { margin: .3rem 0; }
.groups { max-width: none; padding-left: 1.2rem; } .groups strong { font-weight: 600; }
.groups ul { max-width: none; columns: 30rem; font-size: .875rem; padding-left: 1.2rem; }
.groups ul li { break-inside: avoid; margin: .15rem 0; }
a { color: var(--on); }
nav ol { padding: 0; columns: 20rem; list-style: none; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .8125rem; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .3rem .35rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.n { text-align: right; white-space: nowrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 32rem), 1fr));
  gap: 1rem; margin: 1rem 0; align-items: start; }
figure { margin: 0; padding: .75rem; background: var(--panel); border-radius: .5rem; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .875rem; margin-top: .4rem; }
details { margin: 1rem 0; } summary { cursor: pointer; color: var(--soft); }
pre { overflow-x: auto; padding: .75rem; background: var(--panel); border-radius: .5rem;
  font-size: .8125rem; }
@media print { body { max-width: none; } figure { break-inside: avoid; } }
";

/// Makes a complete page.
pub(super) fn page(title: &str, blocks: &[Block]) -> String {
    let title = escape(title);
    let contents: String = blocks.iter().filter_map(entry).collect();
    let body = html(blocks);
    // The table of contents comes after the introduction, which ends at the first heading.
    let (start, rest) = body.split_at(body.find("<h2").unwrap_or(0));
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n\
         {start}<nav><ol>{contents}</ol></nav>\n{rest}</body>\n</html>\n"
    )
}

fn entry(block: &Block) -> Option<String> {
    let Block::Heading(2, text) = block else { return None };
    Some(format!("<li><a href=\"#{}\">{}</a></li>", anchor(text), escape(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_refers_to_no_other_file() {
        let blocks =
            [Block::Paragraph("what this is".to_owned()), Block::Heading(2, "First".to_owned())];
        let text = page("A & B", &blocks);
        assert!(text.contains("<title>A &amp; B</title>"), "{text}");
        assert!(text.contains("<a href=\"#first\">First</a>"), "{text}");
        assert!(text.find("what this is").unwrap() < text.find("<nav>").unwrap());
        for word in ["http", "src=", "url(", "@import"] {
            assert!(!text.contains(word), "{word} is in the page");
        }
    }
}
