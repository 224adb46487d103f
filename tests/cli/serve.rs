//! `dovetail serve`: settings and their layers, readiness, shutdown.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};

use super::harness::{Server, command, json_lines, names_in, run, stderr, stdout, wait_until};

#[test]
fn settings_come_from_flags_then_environment_then_file_then_defaults() {
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
fn the_printed_configuration_is_valid() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dovetail.toml");
    let first = run(&["serve", "--listen", "127.0.0.1:0", "--endpoints", "5", "--insecure", "--print-config"]);
    std::fs::write(&file, &first.stdout).unwrap();
    let again = run(&["serve", "--config", file.to_str().unwrap(), "--print-config"]);
    assert!(again.status.success(), "{}", stderr(&again));
    // Only the origin of each setting differs: a comment after two spaces.
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
    assert!(sound.status.success() && stdout(&sound).contains("valid"), "{}", stderr(&sound));
    for flag in ["--queue-limit", "--jobs-per-device", "--stream-limit", "--upload-limit", "--ticket-seconds"] {
        let useless = run(&["serve", "--check-config", flag, "0"]);
        assert_eq!(useless.status.code(), Some(2), "{flag}");
        assert!(stderr(&useless).contains(&format!("{flag} is 0, so ")), "{}", stderr(&useless));
    }
    let missing = run(&["serve", "--check-config", "--token-file", "/nowhere/tokens"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(stderr(&missing).contains("token-file names /nowhere/tokens"), "{}", stderr(&missing));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong");
    std::fs::write(&file, "not a token line\n").unwrap();
    let file = file.to_str().unwrap();
    for (flags, words) in [
        (["--listen", "0.0.0.0:0"], "insecure"),
        (["--endpoints", "0"], "--endpoints"),
        (["--devices", "host:65535"], "--devices"),
        (["--devices", "quantum:1"], "write auto, cuda"),
        (["--devices", "cuda:1,cuda:1"], "which names cuda twice"),
        (["--devices", "auto,host:1"], "and auto takes no other entry"),
        (["--host-memory", "plenty"], "not a size"),
        (["--host-memory", "4"], "4 B, and must not be less than 1.0 MiB; a number without a unit is bytes"),
        (["--device-memory", "4"], "did you mean 4GiB?"),
        (["--device-memory", "gpu=1GiB"], "as in cuda=auto,host=8GiB"),
        (["--device-cache", "4"], "--device-cache: \"4\" is 4 B"),
        (["--log", "verbose"], "\"verbose\" is not a level; write off, error, warn, info"),
        (["--token-file", file], "token file"),
        (["--topology", file], "topology file"),
    ] {
        let wrong = run(&["serve", "--check-config", flags[0], flags[1]]);
        assert_eq!(wrong.status.code(), Some(2), "{flags:?}: {}", stderr(&wrong));
        assert!(stderr(&wrong).contains(words), "{flags:?}: {}", stderr(&wrong));
        // `--print-config` and `serve` refuse the same settings with the same words.
        for action in [&["--print-config"][..], &[]] {
            let also = run(&[&["serve"], action, &flags[..]].concat());
            assert_eq!(also.status.code(), Some(2), "{action:?} {flags:?}: {}", stderr(&also));
            assert_eq!((stdout(&also), stderr(&also)), (String::new(), stderr(&wrong)), "{action:?} {flags:?}");
        }
    }
}

/// Regression test: the server accepted such sizes. The system killed it when it used the memory.
#[test]
fn memory_for_tables_and_memory_for_cpu_joins_must_fit_together() {
    let check = |more: &[&str]| run(&[&["serve", "--check-config", "--devices", "host:2"], more].concat());
    for (more, words) in [
        (&[][..], "and joins on the CPU need memory in addition; the sum, at least "),
        (&["--device-memory", "64MiB"], "and --device-memory is 64.0 MiB for each of 2 slices of the CPU; the sum, "),
    ] {
        let refused = check(&[&["--host-memory", "100%"], more].concat());
        let said = stderr(&refused);
        assert_eq!(refused.status.code(), Some(2), "{more:?}: {said}");
        assert!(said.starts_with("error: --host-memory is ") && said.contains(words), "{more:?}: {said}");
        assert!(said.contains(" that this process may use; ask for ") && said.lines().count() == 1, "{more:?}: {said}");
    }
    // At 90%, less than the usual quarter is left for joins on the CPU. They get what is left.
    for sound in [&["--host-memory", "90%"][..], &["--host-memory", "99%", "--device-memory", "1MiB"]] {
        let checked = check(sound);
        assert!(checked.status.success(), "{sound:?}: {}", stderr(&checked));
    }
}

#[test]
fn a_wrong_setting_is_reported_with_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dovetail.toml");
    let in_file = |key: &str| format!("{key} in {}", file.display());
    for (key, value, words) in [
        ("listen", "nowhere", "write an IP address and a port"),
        ("endpoints", "many", "it takes a whole number"),
        ("endpoints", "0", "must be from 1 to 1024"),
        ("devices", "quantum:1", "write auto, cuda"),
        ("host-memory", "plenty", "not a size"),
        ("log", "verbose", "is not a level"),
        ("tls-cert", "c.pem", "needs --tls-key"),
        ("token-file", "/nowhere/tokens", "cannot be read"),
    ] {
        let variable = format!("DOVETAIL_{}", key.replace('-', "_").to_uppercase());
        let output = command().env(&variable, value).args(["serve", "--check-config"]).output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{variable}={value}: {said}");
        assert!(said.contains(&variable) && said.contains(words), "{variable}={value}: {said}");
        assert!(!said.contains(&format!("--{key}")), "{variable}={value}: {said}");

        std::fs::write(&file, format!("{key} = \"{value}\"\n")).unwrap();
        let output = run(&["serve", "--check-config", "--config", file.to_str().unwrap()]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{key} = {value}: {said}");
        assert!(said.contains(&in_file(key)) && !said.contains(&format!("--{key}")), "{key} = {value}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    let output = command().env("DOVETAIL_CONNECT_TIMEOUT", "soon").arg("tables").output().unwrap();
    assert!(stderr(&output).contains("invalid value 'soon' for 'DOVETAIL_CONNECT_TIMEOUT'"), "{}", stderr(&output));
}

#[test]
fn an_unwritable_ready_file_is_refused_at_the_beginning() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for name in ["no/such/ready.json", ""] {
        let output = run(&["serve", "--listen", "127.0.0.1:0", "--admin-listen", "off", "--ready-file", &path(name)]);
        assert_eq!((output.status.code(), stdout(&output)), (Some(2), String::new()), "{name}: {}", stderr(&output));
        assert!(stderr(&output).contains("writing the file of --ready-file, "), "{}", stderr(&output));
    }
    assert_eq!(names_in(folder.path()), [""; 0]);
    // Regression test: the server waited for a writer of the pipe.
    assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
    for special in [&path("pipe"), "/dev/null"] {
        let output = run(&["serve", "--listen", "127.0.0.1:0", "--admin-listen", "off", "--ready-file", special]);
        assert_eq!(output.status.code(), Some(2), "{special}: {}", stderr(&output));
        assert!(stderr(&output).contains("it is a pipe or a device; give the name of a file"), "{}", stderr(&output));
    }
    assert_eq!(names_in(folder.path()), ["pipe"]);
    std::fs::remove_file(path("pipe")).unwrap();
    // `--print-config` starts nothing, and its user may lack permission to write the ready file.
    let printed = run(&["serve", "--print-config", "--ready-file", &path("no/such/ready.json")]);
    assert!(printed.status.success(), "{}", stderr(&printed));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = run(&["serve", "--listen", &address, "--admin-listen", "off", "--ready-file", &path("ready.json")]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(names_in(folder.path()), [""; 0], "a server that did not start is not ready");
    // A server removes the ready file of a dead server, but not that of a live one.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for (of, stays) in [(&address, true), (&gone, false)] {
        std::fs::write(path("ready.json"), json!({ "flight": of, "admin": null }).to_string()).unwrap();
        let output =
            run(&["serve", "--listen", &address, "--admin-listen", "off", "--ready-file", &path("ready.json")]);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(std::fs::exists(path("ready.json")).unwrap(), stays, "of {of}");
    }

    // The demo checks these options before it generates data, which would take minutes at this
    // scale.
    let demo = ["demo", "--scale", "10"];
    let output = run(&[&demo[..], &["--devices", "nonsense"]].concat());
    assert!(stderr(&output).contains("--devices is \"nonsense\"; write auto"), "{}", stderr(&output));
    assert!(!output.status.success() && stdout(&output).is_empty(), "{}", stdout(&output));
    let output = run(&[&demo[..], &["--strategy", "magic"]].concat());
    assert!(stderr(&output).contains("radix-hash-gfur"), "{}", stderr(&output));
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn an_open_address_without_credentials_is_refused() {
    let output = run(&["serve", "--listen", "0.0.0.0:0", "--admin-listen", "off"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("insecure"), "{}", stderr(&output));
}

#[test]
fn a_taken_port_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (listen, admin, flag) in [(&*address, "off", "--listen"), ("127.0.0.1:0", &*address, "--admin-listen")] {
        let output = run(&["serve", "--listen", listen, "--admin-listen", admin]);
        assert_eq!(output.status.code(), Some(1));
        let said = stderr(&output);
        assert!(said.contains(&address) && said.contains(&format!("give {flag} another port")), "{said}");
        // The user gets the error without waiting for devices to be opened and measured.
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_host_name_is_refused_with_the_numeric_address() {
    for (given, expected) in
        [("localhost", "127.0.0.1:8815"), ("localhost:8815", "127.0.0.1:8815"), ("8815", "127.0.0.1:8815")]
    {
        let output = run(&["serve", "--check-config", "--listen", given]);
        assert_eq!(output.status.code(), Some(2), "{given}");
        assert!(stderr(&output).contains(expected), "{given}: {}", stderr(&output));
    }
}

#[test]
fn an_environment_variable_that_is_not_a_setting_is_warned_about() {
    let check = |name: &str| command().env(name, "1GiB").args(["serve", "--check-config"]).output().unwrap();
    let misspelt = check("DOVETAIL_HOSTMEMORY");
    assert!(misspelt.status.success(), "other programs may have variables of that kind: {}", stderr(&misspelt));
    let expected = "DOVETAIL_HOSTMEMORY is not a setting and is ignored; did you mean DOVETAIL_HOST_MEMORY?";
    assert!(stderr(&misspelt).contains(expected), "{}", stderr(&misspelt));
    let unlike = check("DOVETAIL_WORKERS");
    let expected = "DOVETAIL_WORKERS is not a setting and is ignored; `dovetail serve --help` lists the variables";
    assert!(stderr(&unlike).contains(expected), "{}", stderr(&unlike));
    for known in ["DOVETAIL_HOST_MEMORY", "DOVETAIL_SERVER", "DOVETAIL_TOKEN", "DOVETAIL_SERVICE_HOST"] {
        assert_eq!(stderr(&check(known)), "", "{known}");
    }
}

#[test]
fn a_server_reports_its_addresses_and_ends_when_asked() {
    let server = Server::start(&[]);
    assert!(server.flight.starts_with("http://127.0.0.1:"));
    assert!(server.admin.is_some());
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn tls_files_with_unexpected_contents_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new(folder.path(), "ca");
    for name in ["one", "other"] {
        authority.issue(folder.path(), name);
    }
    let client = |cert: &str, key: &str| {
        let line = ["tables", "--server", "https://127.0.0.1:1", "--ca", "ca.pem", "--cert", cert, "--key", key];
        stderr(&command().current_dir(folder.path()).args(line).output().unwrap())
    };
    let said = client("one.pem", "other-key.pem");
    let expected = "error: --key names other-key.pem, which is not the private key of the certificate in one.pem, which --cert names";
    assert!(said.starts_with(expected), "{said}");
    let said = client("one.pem", "one.pem");
    assert!(said.starts_with("error: there is no private key in one.pem, which --key names; it takes PEM"), "{said}");
    std::fs::write(folder.path().join("text"), "no PEM at all\n").unwrap();
    let check = |cert: &str, key: &str| {
        let line = ["serve", "--check-config", "--tls-cert", cert, "--tls-key", key];
        command().current_dir(folder.path()).args(line).output().unwrap()
    };
    for (cert, key, words) in [
        ("one-key.pem", "one.pem", "--tls-cert and --tls-key have each other's file: "),
        ("one.pem", "other.pem", "other.pem, which holds no private key in PEM, but a certificate"),
        ("one-key.pem", "one-key.pem", "one-key.pem, which holds no certificate in PEM, but a private key"),
        ("text", "one-key.pem", "text, which holds no certificate in PEM\n"),
        (
            "one.pem",
            "other-key.pem",
            "--tls-key names other-key.pem, which is not the private key of the certificate in one.pem, which --tls-cert names",
        ),
    ] {
        let output = check(cert, key);
        assert_eq!(output.status.code(), Some(2), "{cert} {key}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{cert} {key}: {}", stderr(&output));
        assert!(!stderr(&output).contains("Transport"), "{cert} {key}: {}", stderr(&output));
    }
    let output = check("one.pem", "one-key.pem");
    assert!(output.status.success() && stderr(&output).is_empty(), "{}", stderr(&output));

    let tls = ["serve", "--check-config", "--tls-cert", "one.pem", "--tls-key", "one-key.pem"];
    let unreadable = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    std::fs::write(folder.path().join("unreadable.pem"), unreadable).unwrap();
    let whole = std::fs::read_to_string(folder.path().join("ca.pem")).unwrap();
    std::fs::write(folder.path().join("cut.pem"), &whole[..whole.len() / 2]).unwrap();
    for (authority, words) in [
        ("text", "--tls-client-ca names text, which holds no certificate in PEM\n"),
        ("one-key.pem", "--tls-client-ca names one-key.pem, which holds no certificate in PEM, but a private key\n"),
        ("unreadable.pem", "--tls-client-ca names unreadable.pem, which holds no certificate of an authority"),
        ("cut.pem", "--tls-client-ca names cut.pem, in which a certificate is damaged or cut short"),
    ] {
        let line = [&tls[..], &["--tls-client-ca", authority]].concat();
        let output = command().current_dir(folder.path()).args(line).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{authority}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{authority}: {}", stderr(&output));
    }
}

#[test]
fn a_certificate_outside_its_dates_is_warned_about() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (cert, key_file) = (file("cert.pem"), file("key.pem"));
    for (years, words) in
        [([2000, 2001], "expired on 2001-01-01T00:00:00Z"), ([9000, 9001], "is not valid before 9000-01-01T00:00:00Z")]
    {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(years[0], 1, 1);
        params.not_after = rcgen::date_time_ymd(years[1], 1, 1);
        std::fs::write(&cert, params.self_signed(&key).unwrap().pem()).unwrap();
        std::fs::write(&key_file, key.serialize_pem()).unwrap();
        let tls = ["--devices", "host:1", "--tls-cert", &cert, "--tls-key", &key_file];
        let checked = run(&[&["serve", "--check-config"], &tls[..]].concat());
        assert!(checked.status.success() && stdout(&checked).contains("valid"), "{}", stderr(&checked));
        assert!(stderr(&checked).contains(words), "{}", stderr(&checked));
        let log = Server::start(&tls).log();
        assert!(log.lines().any(|line| line.contains("WARN") && line.contains(words)), "{log}");
    }
}

#[test]
fn a_secret_that_other_users_can_read_is_warned_about() {
    let folder = tempfile::tempdir().unwrap();
    Authority::new(folder.path(), "ca").issue(folder.path(), "one");
    let tokens = folder.path().join("tokens");
    std::fs::write(&tokens, "sesame-sesame-sesame acme writer\n").unwrap();
    let line = "serve --check-config --tls-cert one.pem --tls-key one-key.pem --token-file tokens";
    let check = |mode: u32| {
        for name in ["tokens", "one-key.pem"] {
            std::fs::set_permissions(folder.path().join(name), Permissions::from_mode(mode)).unwrap();
        }
        let output = command().current_dir(folder.path()).args(line.split(' ')).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    assert_eq!(check(0o640), "");
    let said = check(0o644);
    for words in ["--tls-key names one-key.pem", "--token-file names tokens", "chmod o= tokens"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!said.contains("sesame"), "{said}");
}

/// Like `--token-file <(...)`: a pipe can be read only once.
#[test]
fn a_file_of_tokens_may_be_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("tokens");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let writer = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::write(pipe, "sesame-sesame-sesame acme writer\n")
    });
    let server = Server::start(&["--token-file", pipe.to_str().unwrap()]);
    assert_eq!(server.ok(&["tables", "--token", "sesame-sesame-sesame"]).lines().count(), 1);
    writer.join().unwrap().unwrap();
    server.send("-HUP");
    let said = server.log_lines(1, |line| line.contains("SIGHUP: "));
    assert!(said[0].contains("tokens is not an ordinary file, so it is read only when the server starts"), "{said:?}");
    server.ok(&["tables", "--token", "sesame-sesame-sesame"]);
}

#[test]
fn a_client_is_served_only_with_the_token() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    std::fs::write(&tokens, "sesame-sesame-sesame acme writer\n").unwrap();
    let server = Server::start(&["--token-file", tokens.to_str().unwrap()]);
    let refused = server.run(&["tables", "--json"]);
    assert!(stderr(&refused).contains("unauthenticated"), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("--token TOKEN, --token @FILE or DOVETAIL_TOKEN"), "{}", stderr(&refused));
    let wrong = server.run(&["tables", "--token", "open"]);
    assert!(stderr(&wrong).contains("check the token of --token or DOVETAIL_TOKEN"), "{}", stderr(&wrong));
    assert_eq!(server.ok(&["tables", "--token", "sesame-sesame-sesame"]).lines().count(), 1);
    let own = folder.path().join("own");
    std::fs::write(&own, "sesame-sesame-sesame\n").unwrap();
    server.ok(&["tables", "--token", &format!("@{}", own.display())]);
}

/// Uploads a table of three rows, joins it with itself, and makes a call that is refused.
fn make_calls(server: &Server) {
    std::fs::write(server.path().join("t.csv"), "k\n1\n2\n3\n").unwrap();
    server.ok(&["put", "t.csv"]);
    server.ok(&["join", "t", "t", "--on", "k", "-o", "j.csv"]);
    server.fails(&["get", "nowhere"]);
}

#[test]
fn the_json_log_has_one_access_line_per_call_with_caller_request_and_amounts() {
    let server = Server::start(&["--log-format", "json", "--log", "info", "--devices", "host:1", "--endpoints", "1"]);
    make_calls(&server);
    let line = |rpc: &str, status: &str| -> Value {
        let lines = server.log_lines(1, |line| {
            serde_json::from_str::<Value>(line).is_ok_and(|line| {
                line["target"] == "dovetail::access" && line["rpc"] == rpc && line["status"] == status
            })
        });
        assert_eq!(lines.len(), 1, "{lines:?}");
        serde_json::from_str(&lines[0]).unwrap()
    };
    let number =
        |line: &Value, field: &str| line[field].as_f64().unwrap_or_else(|| panic!("{field} is no number in {line}"));
    let put = line("DoPut", "OK");
    assert_eq!((put["level"].as_str(), put["rows"].as_u64()), (Some("INFO"), Some(3)), "{put}");
    assert!(put["timestamp"].is_string() && put["peer"].as_str().unwrap().starts_with("127.0.0.1:"), "{put}");
    assert!(put["command"].as_str().unwrap().contains('t') && put["tenant"].is_string(), "{put}");
    // Three keys of eight bytes.
    assert!(number(&put, "received_bytes") >= 24.0 && number(&put, "duration_ms") > 0.0, "{put}");
    let get = line("DoGet", "OK");
    assert_eq!(get["rows"], 3, "{get}");
    assert!(number(&get, "sent_bytes") >= 24.0 && number(&get, "exec_ms") > 0.0, "{get}");
    assert!(number(&get, "queue_ms") >= 0.0, "{get}");
    let refused = line("GetFlightInfo", "NOT_FOUND");
    assert!(refused["message"].as_str().unwrap().contains("nowhere"), "{refused}");
    // Progress requests are logged under another target, unless they fail.
    server.fails(&["jobs", "77"]);
    let asked = line("DoAction", "NOT_FOUND");
    assert_eq!(asked["command"], "job 77", "{asked}");
    let polls = server.log_lines(1, |line| line.contains("dovetail::access::poll"));
    for poll in polls {
        let poll: Value = serde_json::from_str(&poll).unwrap();
        assert_eq!((&poll["level"], &poll["status"]), (&"INFO".into(), &"OK".into()), "{poll}");
        assert_eq!(poll["command"], "job 1", "{poll}");
    }
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn the_text_log_has_the_same_access_lines_without_escapes() {
    let log = "info,dovetail::access::poll=warn";
    let server = Server::start(&["--log-format", "text", "--log", log, "--devices", "host:1", "--endpoints", "1"]);
    make_calls(&server);
    let line = |rpc: &str, status: &str| {
        let (rpc, status) = (format!("rpc=\"{rpc}\""), format!("status=\"{status}\""));
        let lines = server.log_lines(1, |line| line.contains(&rpc) && line.contains(&status));
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines.into_iter().next().unwrap()
    };
    for (line, rows) in [(line("DoPut", "OK"), 3), (line("DoGet", "OK"), 3), (line("GetFlightInfo", "NOT_FOUND"), 0)] {
        assert!(line.contains("INFO dovetail::access: ") && !line.contains('\x1b'), "{line}");
        assert!(line.contains("peer=\"127.0.0.1:") && line.contains(&format!(" rows={rows} ")), "{line}");
        for field in ["tenant=", "command=", "received_bytes=", "sent_bytes=", "queue_ms=", "exec_ms=", "duration_ms="]
        {
            assert!(line.contains(field), "{field} is not in {line}");
        }
    }
    // The command polled the join's progress before it released the result. The log omits polls.
    assert_eq!(server.log_lines(1, |line| line.contains("command=\"cancel_job 1\"")).len(), 1);
    assert!(!server.log().contains("rpc=\"DoAction\" command=\"job 1\""), "{}", server.log());
}

/// A certificate authority of the test, which writes the files that it signs.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new(folder: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(folder.join(format!("{name}.pem")), issuer.pem()).unwrap();
        Self { issuer }
    }

    /// Writes `NAME.pem` and `NAME-key.pem`, valid for an address of this machine.
    fn issue(&self, folder: &Path, name: &str) {
        let key = KeyPair::generate().unwrap();
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &self.issuer).unwrap();
        std::fs::write(folder.join(format!("{name}.pem")), certificate.pem()).unwrap();
        let key_file = folder.join(format!("{name}-key.pem"));
        std::fs::write(&key_file, key.serialize_pem()).unwrap();
        std::fs::set_permissions(key_file, Permissions::from_mode(0o600)).unwrap();
    }
}

#[test]
fn tls_and_mutual_tls_serve_only_clients_with_the_right_certificates() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new(folder.path(), "ca");
    let stranger = Authority::new(folder.path(), "stranger-ca");
    authority.issue(folder.path(), "server");
    authority.issue(folder.path(), "client");
    stranger.issue(folder.path(), "stranger");
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (ca, stranger_ca) = (file("ca.pem"), file("stranger-ca.pem"));
    let (cert, key) = (file("server.pem"), file("server-key.pem"));
    let tls = ["--devices", "host:1", "--tls-cert", &cert, "--tls-key", &key];
    let put = |server: &Server, more: &[&str]| {
        std::fs::write(server.path().join("t.csv"), "k\n1\n2\n3\n").unwrap();
        server.run(&[&["put", "t.csv", "--mode", "replace"], more].concat())
    };

    let server = Server::start(&tls);
    let served = put(&server, &["--ca", &ca]);
    assert!(served.status.success(), "{}", stderr(&served));
    server.ok(&["join", "t", "t", "--on", "k", "-o", "j.csv", "--ca", &ca]);
    assert_eq!(std::fs::read_to_string(server.path().join("j.csv")).unwrap().lines().count(), 4);
    // A client without trust in the authority, and a client without TLS.
    let plain = server.flight.replace("https:", "http:");
    for (line, words) in [
        (&["--ca", &*stranger_ca][..], "name the authority of the server's certificate with --ca"),
        (&["--server", &plain], "speaks TLS; write --server https://127.0.0.1:"),
    ] {
        let refused = put(&server, line);
        assert_eq!(refused.status.code(), Some(1));
        assert!(stderr(&refused).starts_with("error: ") && stderr(&refused).contains(words), "{}", stderr(&refused));
        assert_eq!(stderr(&refused).lines().count(), 1, "{}", stderr(&refused));
    }
    assert_eq!(server.terminate().code(), Some(0));

    let server = Server::start(&[&tls[..], &["--tls-client-ca", &ca]].concat());
    let (cert, key) = (file("client.pem"), file("client-key.pem"));
    let served = put(&server, &["--ca", &ca, "--cert", &cert, "--key", &key]);
    assert!(served.status.success(), "{}", stderr(&served));
    server.ok(&["get", "t", "-o", "t2.csv", "--ca", &ca, "--cert", &cert, "--key", &key]);
    let (cert, key) = (file("stranger.pem"), file("stranger-key.pem"));
    for (line, words) in [
        (&["--ca", &*ca][..], "only clients with certificates"),
        (&["--ca", &ca, "--cert", &cert, "--key", &key], "not accept this client's certificate"),
    ] {
        let refused = put(&server, line);
        assert_eq!(refused.status.code(), Some(1), "a stranger was served: {}", stdout(&refused));
        let said = stderr(&refused);
        assert!(said.starts_with("error: ") && said.contains(words) && said.contains("--cert"), "{said}");
        assert!(!said.contains("alert"), "{said}");
        // The message names the remedy before it says how the connection ended.
        assert!(said.find("broke").is_none_or(|broke| said.find(words) < Some(broke)), "{said}");
    }
}

/// Returns a number of KiB from the status of a process.
fn memory_kib(server: &Server, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Regression test: the heap of a burst of calls stayed with an idle server.
#[test]
fn freed_heap_returns_to_the_system() {
    use arrow_flight::Action;
    use arrow_flight::flight_service_client::FlightServiceClient;
    use tonic::transport::Endpoint;

    const BURST_KIB: u64 = 150 << 10;
    let server = Server::start(&["--devices", "host:1", "--host-memory", "64MiB"]);
    let before = memory_kib(&server, "VmRSS");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let calls = (0..16).map(|_| async {
            let endpoint = Endpoint::from_shared(server.flight.clone()).unwrap();
            let mut client = FlightServiceClient::new(endpoint.connect().await.unwrap());
            let refused = client.do_action(Action::new("no action", vec![b'x'; 15 << 20])).await;
            assert_eq!(refused.unwrap_err().code(), tonic::Code::InvalidArgument);
        });
        futures::future::join_all(calls).await;
    });
    let peak = memory_kib(&server, "VmHWM");
    assert!(peak > before + BURST_KIB, "the burst took no memory: {before} KiB before it, {peak} KiB at most");
    wait_until("the heap to be returned", || memory_kib(&server, "VmRSS") < before + BURST_KIB / 3);
}
