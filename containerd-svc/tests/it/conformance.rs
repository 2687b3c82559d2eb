use nodekeel_containerd_svc::testing::{MemStore, conformance};

#[tokio::test]
async fn the_memory_store_meets_the_contract() {
    conformance(&MemStore::new(), &"conformance".parse().unwrap()).await;
}
