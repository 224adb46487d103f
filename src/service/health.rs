//! Health for orchestrators: `grpc.health.v1` with a name for each question, and reflection.
//!
//! | service name | question |
//! |---|---|
//! | (empty), `arrow.flight.protocol.FlightService`, `readiness` | should traffic come here? |
//! | `liveness` | should the process be left alone? Serving until it ends |

use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::Error;

/// Service names that report whether traffic should come here.
const READINESS: [&str; 3] = ["", "arrow.flight.protocol.FlightService", "readiness"];

const LIVENESS: &str = "liveness";

/// Sets whether the server takes traffic.
pub(super) async fn set_ready(reporter: &HealthReporter, ready: bool) {
    let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
    for name in READINESS {
        reporter.set_service_status(name, status).await;
    }
}

/// Reports the process as alive, independent of readiness.
pub(super) async fn set_alive(reporter: &HealthReporter) {
    reporter.set_service_status(LIVENESS, ServingStatus::Serving).await;
}

/// Builds reflection of all services that are served.
pub(super) fn reflection<'a>() -> tonic_reflection::server::Builder<'a> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(super::proto::DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(super::proto::FLIGHT_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

pub(super) fn reflection_error(error: &tonic_reflection::server::Error) -> Error {
    Error::Internal(format!("building the reflection service: {error}"))
}
