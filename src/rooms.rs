//! Test of the layering: no room names a room above it. ARCHITECTURE.md lists the rooms in order.
//!
//! Tests are exempt, because their setup may use rooms above their own.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the rooms, from top to bottom.
fn rooms() -> Vec<String> {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let rooms: Vec<String> =
        page.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split_once("/` |")?.0.to_string())).collect();
    let mut folders: Vec<String> = fs::read_dir(root().join("src"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_string())
        .collect();
    let mut listed = rooms.clone();
    listed.sort();
    folders.sort();
    assert_eq!(listed, folders, "the rooms that ARCHITECTURE.md lists, and those that there are");
    rooms
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_tests = path.file_stem().is_some_and(|stem| stem == "tests" || stem == "testing");
        match path.is_dir() {
            _ if is_tests => {}
            true => files(&path, found),
            false => found.extend(path.extension().is_some_and(|extension| extension == "rs").then_some(path)),
        }
    }
}

/// Returns the names that follow `crate::` in code. A group gives the first name of each member.
fn names(source: &str) -> Vec<String> {
    let code: Vec<&str> = source
        .split("#[cfg(test)]\nmod tests {")
        .take(1)
        .flat_map(str::lines)
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect();
    let code = code.join("\n");
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    let mut names = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let Some(group) = rest.strip_prefix('{') else {
            names.push(rest.chars().take_while(|&character| is_name(character)).collect());
            continue;
        };
        let (mut depth, mut starts) = (1, true);
        for (at, character) in group.char_indices() {
            depth += i32::from(character == '{') - i32::from(character == '}');
            if depth == 0 {
                break;
            }
            if starts && is_name(character) {
                names.push(group[at..].chars().take_while(|&character| is_name(character)).collect());
                starts = false;
            }
            starts |= depth == 1 && character == ',';
        }
    }
    names
}

#[test]
fn no_room_uses_a_room_above_it() {
    let rooms = rooms();
    let mut arrows = 0;
    for (at, room) in rooms.iter().enumerate() {
        let mut found = Vec::new();
        files(&root().join("src").join(room), &mut found);
        for file in found {
            for name in names(&fs::read_to_string(&file).unwrap()) {
                let above = rooms[..at].contains(&name);
                assert!(!above, "{} names {name}, which is above {room} in ARCHITECTURE.md", file.display());
                arrows += usize::from(rooms[at + 1..].contains(&name));
            }
        }
    }
    assert!(arrows > 100, "{arrows} uses of lower rooms were found: this test does not see the code");
}

#[test]
fn used_names_are_found_in_paths_and_groups() {
    let source = "use crate::{Error, a::b, c::{d, crate_e}, f as g}; // crate::no\nlet x = crate::h::i();\nuse crate::j;\n\
                  #[cfg(test)]\nmod tests {\nuse crate::k;\n}";
    assert_eq!(names(source), ["Error", "a", "c", "f", "h", "j"]);
}
