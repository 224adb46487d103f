//! `dovetail serve`: settings and their layers, readiness, the end.

use super::harness::{Server, command, json_lines, run, stderr, stdout};

#[test]
fn flags_win_over_environment_over_file_over_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dovetail.toml");
    std::fs::write(&file, "queue-limit = 1\nstream-limit = 1\nendpoints = 1\n").unwrap();
    let output = command()
        .env("DOVETAIL_CONFIG", &file)
        .env("DOVETAIL_STREAM_LIMIT", "2")
        .env("DOVETAIL_ENDPOINTS", "2")
        .env("DOVETAIL_INSECURE", "1")
        .args(["serve", "--endpoints", "3", "--print-config", "--json"])
        .output()
        .unwrap();
    let printed = &json_lines(&output)[0];
    let said = |key: &str| (printed[key]["value"].clone(), printed[key]["origin"].as_str().unwrap().to_owned());
    assert_eq!(said("endpoints"), (3.into(), "flag".into()));
    assert_eq!(said("stream-limit"), (2.into(), "environment variable DOVETAIL_STREAM_LIMIT".into()));
    assert_eq!(said("queue-limit"), (1.into(), format!("file {}", file.display())));
    assert_eq!(said("upload-limit"), (256.into(), "default".into()));
    assert_eq!(said("insecure").0, true);
}

#[test]
fn the_printed_configuration_is_a_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dovetail.toml");
    let first = run(&["serve", "--listen", "127.0.0.1:0", "--endpoints", "5", "--insecure", "--print-config"]);
    std::fs::write(&file, &first.stdout).unwrap();
    let again = run(&["serve", "--config", file.to_str().unwrap(), "--print-config"]);
    assert!(again.status.success(), "{}", stderr(&again));
    // The origin is behind two spaces, and differs; everything before it must not.
    let values =
        |text: String| text.lines().map(|line| line.split("  #").next().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(values(stdout(&first)), values(stdout(&again)));
    assert!(stdout(&again).contains("endpoints = 5"));
}

#[test]
fn a_file_with_an_unknown_key_is_refused_with_the_closest_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dovetail.toml");
    std::fs::write(&file, "que-limit = 1\n").unwrap();
    for action in [&["--check-config"][..], &["--print-config"], &[]] {
        let line: Vec<&str> = ["serve", "--config", file.to_str().unwrap()].iter().chain(action).copied().collect();
        let output = run(&line);
        assert_eq!(output.status.code(), Some(2), "{line:?}");
        assert!(stderr(&output).contains("\"que-limit\"; did you mean \"queue-limit\"?"), "{}", stderr(&output));
    }
}

#[test]
fn a_configuration_is_checked_without_being_run() {
    let sound = run(&["serve", "--check-config"]);
    assert!(sound.status.success() && stdout(&sound).contains("sound"), "{}", stderr(&sound));
    let missing = run(&["serve", "--check-config", "--token-file", "/nowhere/tokens"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(stderr(&missing).contains("token-file names /nowhere/tokens"), "{}", stderr(&missing));
}

#[test]
fn an_open_address_without_credentials_is_refused() {
    let output = run(&["serve", "--listen", "0.0.0.0:0", "--admin-listen", "off"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("insecure"), "{}", stderr(&output));
}

#[test]
fn a_taken_port_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = run(&["serve", "--listen", &address, "--admin-listen", "off", "--log", "error"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains(&address), "{}", stderr(&output));
}

#[test]
fn a_server_says_where_it_listens_and_ends_when_asked() {
    let server = Server::start(&[]);
    assert!(server.flight.starts_with("http://127.0.0.1:"));
    assert!(server.admin.is_some());
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_client_without_the_token_is_turned_away_and_one_with_it_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    std::fs::write(&tokens, "sesame-sesame-sesame acme writer\n").unwrap();
    let server = Server::start(&["--token-file", tokens.to_str().unwrap()]);
    let refused = server.run(&["tables", "--json"]);
    assert!(stderr(&refused).contains("unauthenticated"), "{}", stderr(&refused));
    assert_eq!(server.ok(&["tables", "--token", "sesame-sesame-sesame"]).lines().count(), 1);
    let own = folder.path().join("own");
    std::fs::write(&own, "sesame-sesame-sesame\n").unwrap();
    server.ok(&["tables", "--token", &format!("@{}", own.display())]);
}
