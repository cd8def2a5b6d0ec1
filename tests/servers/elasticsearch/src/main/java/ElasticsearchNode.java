import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.Set;
import org.elasticsearch.common.logging.LogConfigurator;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.env.Environment;
import org.elasticsearch.node.InternalSettingsPreparer;
import org.elasticsearch.node.Node;
import org.elasticsearch.plugins.PluginsLoader;

/**
 * Runs one node of the plain Elasticsearch server until it is told to stop.
 *
 * <p>It starts the node directly, without the command line's bootstrap checks, so that it also runs as root.
 * Usage: {@code ElasticsearchNode HOME [SETTING=VALUE ...]}, where HOME holds modules/.
 */
public final class ElasticsearchNode {
    private ElasticsearchNode() {}

    public static void main(String[] arguments) throws Exception {
        Path home = Path.of(arguments[0]).toAbsolutePath();
        Path configuration = Files.createDirectories(home.resolve("config"));
        Environment environment = InternalSettingsPreparer.prepareEnvironment(
                settings(home, arguments), Map.of(), configuration, () -> "pagemill-test");
        LogConfigurator.configureWithoutConfig(environment.settings());
        PluginsLoader modules = PluginsLoader.createPluginsLoader(
                PluginsLoader.loadModulesBundles(environment.modulesDir()), Set.of(), Map.of(), false);

        Node node = new Node(environment, modules);
        node.start();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> close(node)));
        Thread.currentThread().join();
    }

    private static Settings settings(Path home, String[] arguments) {
        Settings.Builder settings = Settings.builder().put("path.home", home.toString());
        for (int i = 1; i < arguments.length; i++) {
            int equals = arguments[i].indexOf('=');
            if (equals < 1) {
                throw new IllegalArgumentException("not SETTING=VALUE: " + arguments[i]);
            }
            settings.put(arguments[i].substring(0, equals), arguments[i].substring(equals + 1));
        }
        return settings.build();
    }

    private static void close(Node node) {
        try {
            node.close();
        } catch (IOException exception) {
            exception.printStackTrace();
        }
    }
}
