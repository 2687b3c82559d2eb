//! Tests of the crate as other crates see it.
//!
//! Where the facts of the original's own tests, and the rows of its tables, are shown (corrected where they
//! were wrong):
//!
//! | Fact or row | Shown by |
//! |---|---|
//! | a single member is created; its keys are written and read | `etcd::lifecycle::etcd_keys_meet_the_store_contract`, `memory::the_memory_store_meets_the_contract` |
//! | it reports its id and name, those of a list of one | `etcd::lifecycle::a_single_member_meets_the_consensus_contract`, `memory::a_memory_member_meets_the_contract` |
//! | restarted from the disk it has its key, its CA, its data | `etcd::lifecycle::a_restarted_member_has_the_same_ca_and_data` |
//! | a revoked serial number is on the disk's list within 5 s | `etcd::rejections::a_revoked_client_is_rejected_once_the_crl_is_on_the_disk` |
//! | a second member, added by the first, reads what that has written | `etcd::cluster::a_learner_joins_and_is_promoted` |
//! | etcd's log lines: fields, callers, empty and invalid ones | logtree's `parse::json` |
//! | keys end where their prefix does; names have no slash | `consensus::etcd::convert`, `node::node_id` (unit tests) |
//! | an authority that may not certify, a leaf that would, another's certificate | `pki::stored::values_of_another_ca_are_rejected`, `a_leaf_certificate_is_rejected_as_a_ca` |
//! | a ticket is the same however often it is requested | `nodes::tickets::repeated_ticket_requests_yield_one_node_and_several_tickets_are_redeemed_in_any_order` |
//! | no file, nothing from QEMU: a cluster is bootstrapped, and existing data is kept | `enrolment::flows::an_empty_node_bootstraps_a_cluster_and_is_listed_in_it`, `enrolment::rejections::a_data_volume_without_a_journal_is_rejected_until_its_erasure_is_configured` |
//! | no file, a ticket from QEMU: it joins | `enrolment::flows::a_node_without_an_esp_file_joins_by_the_firmware_ticket` |
//! | a ticket in the file: it joins, and QEMU's is not read | `enrolment::flows::a_node_with_a_ticket_joins_and_then_ignores_the_ticket`, `nodes::enrolment_config::a_ticket_is_found_in_either_source_and_the_esp_file_wins` |
//! | an empty or invalid file: `Failed`, nothing is bootstrapped | `enrolment::truncation::a_truncated_enrolment_config_is_an_error_that_names_the_file_and_bootstraps_nothing`, `nodes::enrolment_config::{an_empty_config_is_an_error_and_not_absent, an_invalid_config_is_an_error_that_names_the_file_and_leaves_it_unchanged}` |
//! | an unreadable file, or QEMU's: an error, the next source is not tried | `nodes::enrolment_config::an_unreadable_config_is_an_error_and_never_absent` |
//! | each pair of states; a final one accepts nothing and stays | `enrolment::fsm_test::{only_transitions_in_the_table_are_taken_and_a_rejected_one_changes_nothing, every_state_handles_every_input_and_final_states_reject_all}` (unit tests) |
//!
//! Registration of nodes by calls, TPM modes, storage policies and the health of nodes belong to later
//! originals, and are not in this crate; nor is a metrics address, which etcd serves beside its keys.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod enrolment;
#[cfg(feature = "etcd")]
mod etcd;
mod golden;
mod list_watcher;
mod member_run;
mod memory;
#[cfg(feature = "netlink")]
mod network;
mod nodes;
mod pki;
#[cfg(feature = "etcd")]
mod voters;
