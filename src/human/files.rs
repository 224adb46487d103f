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

/// Returns a warning about a file with a secret, named by `flag`, that all users of the host can
/// read; `None` for any other file.
pub fn readable_by_others(flag: &str, path: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let file = path.metadata().ok()?;
    // A pipe is gone after it was read.
    (file.is_file() && file.mode() & 0o004 != 0).then(|| {
        let path = path.display();
        format!("{flag} names {path}, which holds secrets and which all users of this host can read: chmod o= {path}")
    })
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
    fn a_secret_that_all_users_can_read_gets_a_warning() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, "").unwrap();
        for (mode, warned) in [(0o600, false), (0o640, false), (0o604, true), (0o644, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let warning = readable_by_others("--token-file", &path);
            assert_eq!(warning.is_some(), warned, "{mode:o}: {warning:?}");
        }
        assert_eq!(readable_by_others("--token-file", &folder.path().join("none")), None);
    }

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
