//! Maintenance of etcd's database.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use etcd_client as api;
use futures_util::stream;
use tokio::time::timeout;

use super::convert::{CALL_TIMEOUT, membership_error};
use super::kv::EtcdKv;
use crate::consensus::{MemberId, MembershipError, SnapshotStream, StoreAlarm, StoreMaintenance};

/// The timeout of a defragmentation: a database of many gigabytes on a slow disk.
const DEFRAGMENT_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// The timeout of each piece of a snapshot: etcd reads 32 KiB for it.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);

/// Maintenance by the client of this node's member.
#[derive(Clone)]
pub(super) struct EtcdMaintenance {
    kv: EtcdKv,
}

impl EtcdMaintenance {
    pub(super) fn new(kv: EtcdKv) -> EtcdMaintenance {
        EtcdMaintenance { kv }
    }

    /// Makes a call within a time, until the store is stopped.
    async fn call<T>(
        &self,
        operation: &'static str,
        limit: Duration,
        call: impl Future<Output = Result<T, api::Error>>,
    ) -> Result<T, MembershipError> {
        tokio::select! {
            biased;
            () = self.kv.stop_token.cancelled() => Err(MembershipError::Stopped),
            answer = timeout(limit, call) => match answer {
                Ok(answer) => answer.map_err(|error| membership_error(operation, error)),
                Err(late) => Err(MembershipError::Unavailable { operation, source: late.into() }),
            },
        }
    }
}

#[async_trait]
impl StoreMaintenance for EtcdMaintenance {
    async fn compact(&self) -> Result<(), MembershipError> {
        const OPERATION: &str = "compact the store";
        let mut keys = self.kv.client.kv_client();
        let present = self.call(OPERATION, CALL_TIMEOUT, keys.get(crate::pki::CA_CERT_PATH, None)).await?;
        let revision = present.header().map_or(0, api::ResponseHeader::revision);
        // With "physical", the answer follows the removal of the entries.
        let options = api::CompactionOptions::new().with_physical();
        match self.call(OPERATION, DEFRAGMENT_TIMEOUT, keys.compact(revision, Some(options))).await {
            Err(MembershipError::Rejected { source, .. })
                if source.to_string().contains("has been compacted") =>
            {
                Ok(())
            }
            answer => answer.map(drop),
        }
    }

    async fn defragment(&self) -> Result<(), MembershipError> {
        let mut maintenance = self.kv.client.maintenance_client();
        self.call("defragment the member", DEFRAGMENT_TIMEOUT, maintenance.defragment()).await.map(drop)
    }

    async fn list_alarms(&self) -> Result<Vec<(MemberId, StoreAlarm)>, MembershipError> {
        let mut maintenance = self.kv.client.maintenance_client();
        let list = maintenance.alarm(api::AlarmAction::Get, api::AlarmType::None, None);
        let listed = self.call("list the alarms", CALL_TIMEOUT, list).await?;
        let alarm = |alarm: &api::AlarmMember| {
            let kind = match alarm.alarm() {
                api::AlarmType::Nospace => "NOSPACE",
                api::AlarmType::Corrupt => "CORRUPT",
                api::AlarmType::None => "NONE",
            };
            let id = MemberId(alarm.member_id());
            (id, StoreAlarm::new(format!("member {id}"), kind))
        };
        Ok(listed.alarms().iter().map(alarm).collect())
    }

    async fn disarm(&self, member: MemberId, alarm: &StoreAlarm) -> Result<(), MembershipError> {
        let kind = match &*alarm.kind {
            "NOSPACE" => api::AlarmType::Nospace,
            "CORRUPT" => api::AlarmType::Corrupt,
            _ => api::AlarmType::None,
        };
        let mut options = api::AlarmOptions::new();
        options.with_member(member.0);
        let mut maintenance = self.kv.client.maintenance_client();
        let disarm = maintenance.alarm(api::AlarmAction::Deactivate, kind, Some(options));
        self.call("disarm an alarm", CALL_TIMEOUT, disarm).await.map(drop)
    }

    async fn snapshot(&self) -> Result<SnapshotStream, MembershipError> {
        const OPERATION: &str = "take a snapshot of the store";
        // This member may be behind the others. It answers a linearizable read once it is not.
        let mut keys = self.kv.client.kv_client();
        self.call(OPERATION, CALL_TIMEOUT, keys.get(crate::pki::CA_CERT_PATH, None)).await?;
        let mut client = self.kv.client.maintenance_client();
        let pieces = self.call(OPERATION, PIECE_TIMEOUT, client.snapshot()).await?;
        Ok(SnapshotStream::new(stream::try_unfold(
            (self.clone(), pieces),
            |(maintenance, mut pieces)| async {
                let piece = maintenance.call(OPERATION, PIECE_TIMEOUT, pieces.message()).await?;
                // etcd 3.4 sends empty pieces for ever if it can't read its file.
                if piece.as_ref().is_some_and(|piece| piece.blob().is_empty() && piece.remaining_bytes() > 0)
                {
                    let source =
                        "etcd can't read its database to the end: see the log of root.cluster.consensus.etcd"
                            .into();
                    return Err(MembershipError::Rejected { operation: OPERATION, source });
                }
                Ok(piece.map(|piece| (piece.blob().to_vec(), (maintenance, pieces))))
            },
        )))
    }
}

impl fmt::Debug for EtcdMaintenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdMaintenance").finish_non_exhaustive()
    }
}
