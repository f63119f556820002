// Sets the colours before anything is shown: no module, because modules run later.
document.documentElement.dataset.theme = localStorage.getItem("inflight-theme") ?? "auto";
