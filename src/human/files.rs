//! Plain words for the system's file errors.

use std::path::Path;

/// Returns the reason why the system refuses a file, in plain words and without error numbers.
pub fn file_failure(path: &Path, error: &std::io::Error) -> String {
    use std::io::ErrorKind as K;
    let above = || path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
    match error.kind() {
        K::NotFound => match above().filter(|above| !above.exists()).last() {
            Some(missing) => format!("there is no folder {}", missing.display()),
            None => "there is no such file".into(),
        },
        K::NotADirectory => match above().find(|above| above.is_file()) {
            Some(file) => format!("{} is a file, not a folder", file.display()),
            None => "a part of its path is not a folder".into(),
        },
        K::IsADirectory => "it is a folder, not a file".into(),
        K::PermissionDenied => "permission denied: the user of this process may not open it".into(),
        K::StorageFull => "the disk is full".into(),
        K::ReadOnlyFilesystem => "its file system is read-only".into(),
        K::InvalidData => "it is not UTF-8 text".into(),
        _ => system_words(error),
    }
}

/// Returns the system's message without its error number.
pub fn system_words(error: impl std::fmt::Display) -> String {
    let said = error.to_string();
    said.split_once(" (os error ").map_or(said.as_str(), |(words, _)| words).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_errors_are_reported_without_the_numbers_of_the_system() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), [0xff, 0xfe]).unwrap();
        let read = |name: &str| file_failure(&at(name), &std::fs::read_to_string(at(name)).unwrap_err());
        assert_eq!(read("none"), "there is no such file");
        assert_eq!(read("no/such/file"), format!("there is no folder {}", at("no").display()));
        assert_eq!(read("file/x"), format!("{} is a file, not a folder", at("file").display()));
        assert_eq!(read(""), "it is a folder, not a file");
        assert_eq!(read("file"), "it is not UTF-8 text");
        let denied = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let said = "permission denied: the user of this process may not open it";
        assert_eq!(file_failure(&at("file"), &denied), said);
        assert_eq!(system_words(std::io::Error::from_raw_os_error(4)), "Interrupted system call");
    }
}
