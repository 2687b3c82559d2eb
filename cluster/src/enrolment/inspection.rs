//! Looks at what is on the disk, and at the ticket.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::cluster_node::SharedState;
use super::driver::EnrolmentDriver;
use super::failure::StepError;
use super::journal::EnrolmentJournal;
use super::plan::{BootstrapPermission, InspectionResult};

/// The pause between two looks for a ticket, while the node waits for one.
const TICKET_PAUSE: Duration = Duration::from_secs(2);

impl EnrolmentDriver {
    pub(super) async fn inspect_disk(&self) -> Result<InspectionResult, StepError> {
        let (mut journal, mut found) = self.open_journal().await?;
        if let InspectionResult::Fresh { ticket: Some(_), .. } = found {
            drop(journal);
            let address = self.wait_address().await?;
            self.set_condition(None);
            // It ends a request to bootstrap, even if it is replaced or removed by now.
            if self.shared.bootstrap_request.send_replace(false) {
                tracing::warn!("the request to bootstrap a cluster ends: a ticket was found");
            }
            (journal, found) = self.open_journal().await?;
            self.check_ticket_host(&found, address)?;
        }
        self.run_state().journal = Some(journal);
        Ok(found)
    }

    async fn open_journal(&self) -> Result<(EnrolmentJournal, InspectionResult), StepError> {
        let shared = Arc::clone(&self.shared);
        let opened = self.run_blocking(move || {
            let SharedState { deps, test_hook: hook, .. } = &*shared;
            let bootstrap = || shared.bootstrap_permission();
            EnrolmentJournal::open(&deps.journal_dir, &deps.enrolment, bootstrap, hook)
        });
        opened.await
    }

    /// Rejects a ticket for another host before the journal binds this node to it.
    fn check_ticket_host(&self, found: &InspectionResult, address: IpAddr) -> Result<(), StepError> {
        let InspectionResult::Fresh { ticket: Some(ticket), .. } = found else { return Ok(()) };
        ticket.check_address(address, self.shared.deps.consensus.peer_port).map_err(StepError::Ticket)
    }

    /// Waits for a ticket, or for the permission to bootstrap, and inspects the disk again. Nothing notifies of
    /// a ticket in the firmware, so the sources are looked at again and again.
    pub(super) async fn await_instruction(&self) -> Result<InspectionResult, StepError> {
        let mut request = self.shared.bootstrap_request.subscribe();
        loop {
            let _ = tokio::time::timeout(TICKET_PAUSE, request.changed()).await;
            let shared = Arc::clone(&self.shared);
            let is_instructed = self.run_blocking(move || {
                let has_ticket = !matches!(shared.deps.enrolment.load_ticket(), Ok(None));
                Ok(has_ticket || shared.bootstrap_permission()? == BootstrapPermission::Granted)
            });
            if is_instructed.await? {
                self.run_state().journal = None;
                return self.inspect_disk().await;
            }
        }
    }
}
