//! Flight service: each RPC identifies its caller, and calls the file that serves it.

use std::pin::Pin;
use std::sync::Arc;

use arrow_flight::flight_service_server::FlightService;
use arrow_flight::{
    Action, ActionType, Criteria, Empty, FlightData, FlightDescriptor, FlightInfo, HandshakeRequest, HandshakeResponse,
    PollInfo, PutResult, SchemaResult, Ticket,
};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use tonic::{Request, Response, Status, Streaming};

use super::cpu_work::CpuWork;
use super::get_info::Asker;
use super::ingest::{self, UploadHandler};
use super::shared::Shared;
use super::{actions, get_info, handshake};
use crate::{Error, Result};

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Serves Arrow Flight.
pub struct Flight {
    shared: Arc<Shared>,
    uploads: Arc<dyn UploadHandler>,
}

impl Flight {
    /// Creates the service of a server.
    pub fn new(shared: Arc<Shared>, uploads: Arc<dyn UploadHandler>) -> Self {
        Self { shared, uploads }
    }

    fn asker<T>(&self, request: &Request<T>) -> Result<Asker> {
        Asker::of(&self.shared, request.metadata().as_ref(), request.extensions())
    }
}

/// Returns the status of a call that the layer in front of this service should have served.
fn passed_by(method: &str) -> Status {
    Error::Internal(format!("{method} reached the service without passing the layer that serves it")).into()
}

#[tonic::async_trait]
impl FlightService for Flight {
    type HandshakeStream = Answers<HandshakeResponse>;
    type ListFlightsStream = Answers<FlightInfo>;
    type DoGetStream = Answers<FlightData>;
    type DoPutStream = Answers<PutResult>;
    type DoExchangeStream = Answers<FlightData>;
    type DoActionStream = Answers<arrow_flight::Result>;
    type ListActionsStream = Answers<ActionType>;

    async fn handshake(
        &self,
        request: Request<Streaming<HandshakeRequest>>,
    ) -> Result<Response<Self::HandshakeStream>, Status> {
        Ok(handshake::answer(&self.shared.credentials.authenticator(), request).await?)
    }

    async fn list_flights(&self, request: Request<Criteria>) -> Result<Response<Self::ListFlightsStream>, Status> {
        let asker = self.asker(&request)?;
        let prefix = std::str::from_utf8(&request.get_ref().expression)
            .map_err(|_| Error::Invalid("the criteria are not UTF-8; write the first letters of table names".into()))?;
        let infos = get_info::list(&self.shared, asker, prefix)?;
        Ok(Response::new(infos.map_err(Status::from).boxed()))
    }

    async fn get_flight_info(&self, request: Request<FlightDescriptor>) -> Result<Response<FlightInfo>, Status> {
        let asker = self.asker(&request)?;
        Ok(Response::new(get_info::flight_info(&self.shared, asker, request.into_inner()).await?))
    }

    async fn poll_flight_info(&self, request: Request<FlightDescriptor>) -> Result<Response<PollInfo>, Status> {
        let asker = self.asker(&request)?;
        Ok(Response::new(get_info::poll(&self.shared, asker, request.into_inner()).await?))
    }

    async fn get_schema(&self, request: Request<FlightDescriptor>) -> Result<Response<SchemaResult>, Status> {
        let asker = self.asker(&request)?;
        Ok(Response::new(get_info::schema(&self.shared, asker, request.into_inner()).await?))
    }

    async fn do_get(&self, _request: Request<Ticket>) -> Result<Response<Self::DoGetStream>, Status> {
        Err(passed_by("DoGet"))
    }

    async fn do_put(&self, request: Request<Streaming<FlightData>>) -> Result<Response<Self::DoPutStream>, Status> {
        // Only uploads to a command arrive here. The layer in front serves all others.
        let (metadata, extensions, messages) = request.into_parts();
        let mut head = http::Request::new(()).into_parts().0;
        (head.headers, head.extensions) = (metadata.into_headers(), extensions);
        let arena = self.shared.catalog.arena().clone();
        let cpu_work = head.extensions.get::<CpuWork>().unwrap_or(&self.shared.cpu_work).clone();
        let limits = self.shared.limits.of_uploads();
        let acks = ingest::upload_messages(self.uploads.clone(), head, messages, arena, limits, cpu_work);
        let results = acks.map_ok(|ack| PutResult { app_metadata: ack.to_json().into() }).map_err(Status::from);
        Ok(Response::new(results.boxed()))
    }

    async fn do_exchange(
        &self,
        _request: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoExchangeStream>, Status> {
        Err(passed_by("DoExchange"))
    }

    async fn do_action(&self, request: Request<Action>) -> Result<Response<Self::DoActionStream>, Status> {
        let asker = self.asker(&request)?;
        let answer = actions::run(&self.shared, &asker, request.into_inner()).await?;
        asker.memory.hold(answer.results.iter().map(|result| result.len() as u64).sum(), "the answer")?;
        let made = stream::iter(answer.results.into_iter().map(Ok))
            .chain(answer.more.unwrap_or_else(|| stream::empty().boxed()));
        let results = made.map(|result| Ok(arrow_flight::Result { body: result? }));
        let mut response = Response::new(results.boxed());
        if let Some(cookie) = answer.cookie {
            response.metadata_mut().as_mut().insert(http::header::SET_COOKIE, cookie);
        }
        Ok(response)
    }

    async fn list_actions(&self, _request: Request<Empty>) -> Result<Response<Self::ListActionsStream>, Status> {
        Ok(Response::new(stream::iter(actions::list()).map(Ok).boxed()))
    }
}
