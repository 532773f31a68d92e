from flax_amp.debug._explain import explain as explain
