use nodekeel_containerd_svc::testing::{MemStore, conformance};

#[tokio::test]
async fn the_store_in_memory_keeps_the_contract() {
    conformance(&MemStore::new(), &"conformance".parse().unwrap()).await;
}
